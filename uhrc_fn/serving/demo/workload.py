"""What is served: conversations that grow with the model's answers, or a trace."""

import dataclasses
import random

import numpy as np

from ...replay.tokenizing import byte_tokens
from ...replay.traces import load_trace

ANSWER_TOKENS = 16
NUM_CONVERSATIONS = 4
NUM_TRACE_REQUESTS = 40
LONGEST_PROMPT = 4096
_TURNS = (4, 5)
_SYSTEM_TOPICS = ("types", "objects")
_SYSTEM_BYTES = 800


@dataclasses.dataclass(frozen=True)
class Turn:
    """A request, and what its conversation goes on with.

    Args:
      prompt: int32 token ids.
      rest: what the user says next, and after that, each behind the answer.
    """

    prompt: np.ndarray
    rest: tuple[np.ndarray, ...] = ()

    def after(self, answer: list[int]) -> "Turn | None":
        """The next turn, now that the answer is known; `None` at the end."""
        if not self.rest:
            return None
        parts = (self.prompt, np.asarray(answer, np.int32), self.rest[0])
        return Turn(np.concatenate(parts), self.rest[1:])

    @property
    def longest_prompt(self) -> int:
        """Tokens of the prompt of the last turn."""
        rest = sum(text.size for text in self.rest)
        return self.prompt.size + rest + ANSWER_TOKENS * len(self.rest)

    @property
    def num_requests(self) -> int:
        """Turns of the conversation from this one on."""
        return 1 + len(self.rest)


def conversations(count: int, dice: random.Random) -> list[Turn]:
    """First turns of conversations about Python's own documentation.

    Two assistants have a system prompt each, which their conversations share. The text
    is that of `pydoc_data.topics`, so that nothing need be downloaded.
    """
    from pydoc_data.topics import topics

    systems = [f"<system>\n{topics[t][:_SYSTEM_BYTES]}\n" for t in _SYSTEM_TOPICS]
    subjects = [name for name in sorted(topics) if len(topics[name]) > 1500]
    return [
        _conversation(systems[i % len(systems)], topics[dice.choice(subjects)], dice)
        for i in range(count)
    ]


def _conversation(system: str, document: str, dice: random.Random) -> Turn:
    """Ask about a paragraph of the document, turn after turn."""
    paragraphs = [p for p in document.split("\n\n") if p.strip()]
    asked = dice.choices(paragraphs, k=dice.randint(*_TURNS))
    said = [_question(" ".join(paragraph.split())) for paragraph in asked]
    return Turn(byte_tokens(system + said[0]), tuple(map(byte_tokens, said[1:])))


def _question(about: str) -> str:
    return f"\n<user>\nWhat does the reference say about: {about[:60]}?\n<assistant>\n"


def trace_requests(path: str, limit: int) -> list[Turn]:
    """Requests of a text trace, each by itself, as byte tokens.

    Raises:
      TraceError: it cannot be read.
      ValueError: it holds no text, or a prompt is too long for a demo.
    """
    trace = load_trace(path, page_size=1, limit=limit)
    if trace.token_unit != "byte":
        raise ValueError(
            f"--trace {path}: it holds block ids; wanted a text trace. Replay it with "
            "python -m uhrc_fn.replay."
        )
    prompts = np.split(trace.keys, trace.offsets[1:-1])
    longest = max(prompt.size for prompt in prompts)
    if longest > LONGEST_PROMPT:
        raise ValueError(
            f"--trace {path}: a prompt has {longest:,} bytes; wanted at most "
            f"{LONGEST_PROMPT:,}, which a CPU serves in good time. Lower --limit, or "
            "choose another trace."
        )
    return [Turn(prompt) for prompt in prompts]


def unshared_prompts(count: int, length: int, seed: int) -> list[np.ndarray]:
    """Random prompts: no two begin alike."""
    dice = np.random.default_rng(seed)
    return list(dice.integers(0, 256, (count, length), np.int32))
