"""A workload for anybody: conversations about Python's own documentation."""

import random
from collections.abc import Iterator

NUM_CONVERSATIONS = 240
LIVE_AT_ONCE = 12
MAX_TURNS = 8
SYSTEM_TOPICS = ("types", "objects", "execmodel", "naming")
SYSTEM_BYTES = 1500


def conversations() -> Iterator[str]:
    """Prompts of multi-turn conversations that are held side by side.

    Four assistants have a system prompt each, shared by all of their conversations. A
    prompt is the system prompt and all turns so far. The text is that of
    `pydoc_data.topics`, so it is the same on every machine with the same Python.
    """
    from pydoc_data.topics import topics

    dice = random.Random(0)
    systems = [f"<system>\n{topics[t][:SYSTEM_BYTES]}\n" for t in SYSTEM_TOPICS]
    subjects = [name for name in sorted(topics) if len(topics[name]) > 200]
    waiting = [
        turns(dice.choice(systems), topics[dice.choice(subjects)], dice)
        for _ in range(NUM_CONVERSATIONS)
    ]
    live: list[Iterator[str]] = []
    while waiting or live:
        while waiting and len(live) < LIVE_AT_ONCE:
            live.append(waiting.pop())
        conversation = dice.choice(live)
        prompt = next(conversation, None)
        if prompt is None:
            live.remove(conversation)
        else:
            yield prompt


def turns(prompt: str, document: str, dice: random.Random) -> Iterator[str]:
    """Ask for the document paragraph by paragraph; each answer is one of them."""
    paragraphs = [p for p in document.split("\n\n") if p.strip()]
    start = dice.randrange(len(paragraphs))
    count = dice.randint(1, MAX_TURNS)
    for answer in paragraphs[start : start + count]:
        words = " ".join(answer.split()[:8])
        prompt += f"<user>\nWhat does the reference say about: {words}?\n<assistant>\n"
        yield prompt
        prompt += f"{answer}\n"
