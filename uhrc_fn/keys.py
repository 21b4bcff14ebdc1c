"""Keys are made on the host: padding, namespaces and checks before any dispatch."""

import hashlib
import struct

import numpy as np

from .config import CacheConfig
from .params import NO_NAMESPACE, RadixKey


def namespace(extra_key=None, cache_salt=None) -> np.ndarray:
    """Digest what keeps a request's prefixes apart from others'.

    The encoding is length-prefixed and marks absence, so ("a", "bc"), ("ab", "c"),
    ("", None) and (None, None) are four namespaces.

    Args:
      extra_key: LoRA, modality or tenant name; str, bytes, int, a tuple of those.
      cache_salt: secret of a tenant; likewise.

    Returns:
      int32 [4]: 16 bytes of BLAKE2b; zeros where both are None.
    """
    if extra_key is None and cache_salt is None:
        return NO_NAMESPACE.copy()
    data = _encode(extra_key) + _encode(cache_salt)
    digest = hashlib.blake2b(data, digest_size=16).digest()
    return np.frombuffer(digest, np.int32).copy()


def _encode(part) -> bytes:
    if part is None:
        return b"n"
    if isinstance(part, tuple | list):
        return b"t" + struct.pack("<Q", len(part)) + b"".join(map(_encode, part))
    if isinstance(part, bool) or not isinstance(part, str | bytes | int):
        raise ValueError(
            f"namespace part {part!r} is a {type(part).__name__}; wanted str, bytes, "
            "int, None or a tuple of those. Convert it to a stable string."
        )
    kind = {str: b"s", bytes: b"b", int: b"i"}[type(part)]
    body = part if isinstance(part, bytes) else str(part).encode()
    return kind + struct.pack("<Q", len(body)) + body


def page_bucket(num_pages: int, config: CacheConfig) -> int:
    """Static page count for a key of `num_pages`: a power of two, at most the limit."""
    return min(1 << max(num_pages - 1, 0).bit_length(), config.max_prefix_pages)


def radix_key(
    tokens, config: CacheConfig, *, extra_key=None, cache_salt=None, num_pages=None
) -> RadixKey:
    """Build a key on the host.

    Args:
      tokens: token ids in [0, 2^31), any sequence of ints; NumPy int32 is fastest.
      config: gives page size and `max_prefix_pages`.
      extra_key: see `namespace`.
      cache_salt: see `namespace`.
      num_pages: static page count of the key; None takes the next power of two, so
        that compilations stay few.

    Returns:
      A `RadixKey` of NumPy arrays. Of a prompt longer than `max_prefix_pages` it
      keeps the first pages and says so in `is_truncated`.

    Raises:
      ValueError: tokens are no flat sequence of ids in range, or do not fit.
    """
    ids = np.asarray(tokens)
    if ids.size == 0:
        ids = ids.astype(np.int32)
    if ids.ndim != 1 or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(
            f"tokens is {ids.dtype}{list(ids.shape)}; wanted a flat sequence of "
            "integers. Pass one prompt at a time."
        )
    limit = config.max_prefix_pages * config.page_size
    is_truncated = ids.size > limit
    ids = ids[:limit]
    if ids.size and (ids.min() < 0 or ids.max() >= 1 << 31):
        bad = ids[(ids < 0) | (ids >= 1 << 31)][0]
        raise ValueError(
            f"tokens holds id {bad}; wanted ids in [0, 2^31). "
            "Check the tokenizer's output."
        )
    wanted = -(-ids.size // config.page_size)
    pages = page_bucket(wanted, config) if num_pages is None else num_pages
    if not wanted <= pages <= config.max_prefix_pages:
        raise ValueError(
            f"num_pages={pages} for a prompt of {wanted} pages; wanted {wanted} to "
            f"{config.max_prefix_pages}. Leave num_pages unset."
        )
    padded = np.zeros(max(pages, 1) * config.page_size, np.int32)
    padded[: ids.size] = ids
    return RadixKey(
        token_ids=padded,
        length=np.int32(ids.size),
        namespace=namespace(extra_key, cache_salt),
        is_truncated=np.bool_(is_truncated),
    )


def stack_keys(keys) -> RadixKey:
    """Stack keys for the batched operations, padded to the longest.

    Raises:
      ValueError: there are none.
    """
    keys = list(keys)
    if not keys:
        raise ValueError("stack_keys got no keys; wanted at least one.")
    longest = max(k.token_ids.shape[-1] for k in keys)
    tokens = [np.pad(k.token_ids, (0, longest - k.token_ids.size)) for k in keys]
    return RadixKey(
        token_ids=np.stack(tokens),
        length=np.stack([k.length for k in keys]),
        namespace=np.stack([k.namespace for k in keys]),
        is_truncated=np.stack([k.is_truncated for k in keys]),
    )
