"""The tokenizer inside a GGUF: byte-level BPE from its tokens and merges."""

from collections.abc import Sequence

import numpy as np

from .gguf_file import GGUFFile

_CONTROL = 3
"""Token type of markers such as the start of a turn."""
_IS_DIGIT_ALONE = {"gpt-2": False, "smollm": True}
"""Known pre-tokenizers: GPT-2's, and the same with each digit a token of its own."""


class Tokenizer:
    """Text to token ids and back, as the model was trained with."""

    def __init__(self, file: GGUFFile):
        """Build it from a file's metadata.

        Raises:
          ModuleNotFoundError: the package `tokenizers` is not installed.
          ValueError: the file has a tokenizer of another kind.
        """
        try:
            import tokenizers  # pyright: ignore[reportMissingImports]
            from tokenizers import (  # pyright: ignore[reportMissingImports]
                decoders,
                models,
                pre_tokenizers,
            )
        except ImportError:
            raise ModuleNotFoundError(
                "reading a GGUF's tokenizer needs the package 'tokenizers', which is "
                "not installed; install it with pip install 'uhrc_fn[weights]'."
            ) from None
        kind = file.need("tokenizer.ggml.model"), file.need("tokenizer.ggml.pre")
        if kind[0] != "gpt2" or kind[1] not in _IS_DIGIT_ALONE:
            raise ValueError(
                f"{file.path}: tokenizer {kind}; wanted 'gpt2' with one of "
                f"{tuple(_IS_DIGIT_ALONE)}. Load another file."
            )
        tokens = file.need("tokenizer.ggml.tokens")
        merges = [tuple(pair.split(" ")) for pair in file.need("tokenizer.ggml.merges")]
        types = file.need("tokenizer.ggml.token_type")
        vocabulary = {token: number for number, token in enumerate(tokens)}
        self._inner = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=merges))
        steps: list = [pre_tokenizers.ByteLevel(add_prefix_space=False)]
        if _IS_DIGIT_ALONE[kind[1]]:
            steps.insert(0, pre_tokenizers.Digits(individual_digits=True))
        self._inner.pre_tokenizer = pre_tokenizers.Sequence(steps)
        self._inner.decoder = decoders.ByteLevel()
        pairs = zip(tokens, types, strict=True)
        self._inner.add_special_tokens([t for t, kind in pairs if kind == _CONTROL])
        self.end: int = file.need("tokenizer.ggml.eos_token_id")
        """Token that ends an answer."""

    def encode(self, text: str) -> np.ndarray:
        """Token ids, int32; markers in the text become theirs."""
        return np.array(self._inner.encode(text).ids, np.int32)

    def decode(self, ids: Sequence[int]) -> str:
        """The text of token ids, markers left out."""
        return self._inner.decode([int(i) for i in ids], skip_special_tokens=True)


def chat_text(messages: Sequence[tuple[str, str]]) -> str:
    """A conversation in ChatML, up to where the assistant's next answer begins.

    Args:
      messages: of ``(role, text)``; roles are "system", "user" and "assistant".
    """
    turns = [f"<|im_start|>{role}\n{text}<|im_end|>\n" for role, text in messages]
    return "".join(turns) + "<|im_start|>assistant\n"
