"""From prompts to a workload of real pages: UTF-8 bytes, or a tokenizer's ids."""

import itertools
import pathlib
from collections.abc import Callable, Iterable

import numpy as np

from .workload import Workload


def byte_tokens(text: str) -> np.ndarray:
    """The UTF-8 bytes of a text as token ids."""
    # JSON can carry lone surrogates, which strict UTF-8 refuses.
    raw = text.encode("utf-8", "surrogatepass")
    return np.frombuffer(raw, np.uint8).astype(np.int32)


def load_tokenizer(path: str | pathlib.Path) -> Callable[[str], np.ndarray]:
    """A function from text to the ids of a `tokenizers` file (`tokenizer.json`)."""
    try:
        from tokenizers import Tokenizer  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise ModuleNotFoundError(
            "--tokenizer needs the package 'tokenizers', which is not installed; "
            "install it with pip install 'uhrc_fn[replay]', or leave --tokenizer out "
            "(byte tokens)."
        ) from None
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises bare Exception
        raise ValueError(f"{path}: not a tokenizer file ({error}).") from None
    return lambda text: np.array(tokenizer.encode(text).ids, np.int32)


def text_workload(
    name: str,
    prompts: Iterable[str],
    *,
    page_size: int,
    limit: int | None = None,
    tokenizer: Callable[[str], np.ndarray] | None = None,
) -> Workload:
    """Tokenize the first `limit` prompts."""
    tokenize = tokenizer or byte_tokens
    tokens = [tokenize(prompt) for prompt in itertools.islice(prompts, limit)]
    lengths = np.array([len(t) for t in tokens], np.int64)
    whole = lengths // page_size * page_size
    pieces = [t[:n] for t, n in zip(tokens, whole, strict=True)]
    return Workload(
        name=name,
        page_size=page_size,
        keys=np.concatenate(pieces) if pieces else np.zeros(0, np.int32),
        offsets=np.concatenate([[0], np.cumsum(whole)]).astype(np.int64),
        input_tokens=lengths,
        page_tokens=page_size,
        token_unit="byte" if tokenizer is None else "token",
    )
