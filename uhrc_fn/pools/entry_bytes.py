"""Bytes of one pool entry on one device: a KV page, or a recurrent slot.

All layers of the kind are counted, since a page or slot id stands for its row in every
one of them. `tensor_size` is the width of the mesh's `tensor` axis. Everything here is
host arithmetic on shapes, in Python ints.
"""

import jax.numpy as jnp

from .layout import LANES, WORD_BYTES, round_up


def kv_page_bytes(
    *,
    page_size: int,
    num_layers: int,
    num_kv_heads: int,
    head_dim: int,
    dtype="bfloat16",
    tensor_size: int = 1,
) -> int:
    """Bytes of a page of fused K and V (MHA, GQA, MQA), full or sliding window.

    Args:
      page_size: tokens a page.
      num_layers: layers whose KV this pool holds; the sliding layers for an SWA pool.
      num_kv_heads: KV heads of the model; fewer than devices are replicated.
      head_dim: width of a head, padded to 128.
      dtype: of the buffer.
      tensor_size: devices that share the heads.

    Returns:
      bytes on each device.

    Raises:
      ValueError: a size is not positive, or heads and devices do not divide.
    """
    _require_positive(
        page_size=page_size,
        num_layers=num_layers,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        tensor_size=tensor_size,
    )
    if num_kv_heads % tensor_size and tensor_size % num_kv_heads:
        raise ValueError(
            f"num_kv_heads={num_kv_heads} with tensor_size={tensor_size}; wanted one "
            "to divide the other. Choose a tensor axis that divides the KV heads."
        )
    heads = max(1, num_kv_heads // tensor_size)
    packing = _packing(dtype)
    rows = round_up(2 * heads, packing)  # K and V interleaved, packed into words
    return page_size * num_layers * rows * round_up(head_dim, LANES) * _size(dtype)


def mla_page_bytes(
    *,
    page_size: int,
    num_layers: int,
    kv_lora_rank: int,
    rope_head_dim: int,
    dtype="bfloat16",
) -> int:
    """Bytes of a page of MLA latents, the same on every device of `tensor`.

    Args:
      page_size: tokens a page; packed into words, so rounded up to them.
      num_layers: layers of the pool.
      kv_lora_rank: width of the compressed KV, padded to 128 by itself.
      rope_head_dim: width of the rotary part, padded to 128 by itself.
      dtype: of the buffer.

    Returns:
      bytes on each device; latents are replicated over `tensor`.

    Raises:
      ValueError: a size is not positive.
    """
    _require_positive(
        page_size=page_size,
        num_layers=num_layers,
        kv_lora_rank=kv_lora_rank,
        rope_head_dim=rope_head_dim,
    )
    width = round_up(kv_lora_rank, LANES) + round_up(rope_head_dim, LANES)
    return round_up(page_size, _packing(dtype)) * num_layers * width * _size(dtype)


def recurrent_slot_bytes(
    *,
    num_layers: int,
    num_v_heads: int,
    v_head_dim: int,
    num_k_heads: int | None = None,
    k_head_dim: int | None = None,
    conv_kernel_size: int = 1,
    state_dtype="float32",
    conv_dtype="bfloat16",
    tensor_size: int = 1,
) -> int:
    """Bytes of a recurrent slot: temporal and conv state of every recurrent layer.

    A layer holds ``[num_v_heads, k_head_dim, v_head_dim]`` of temporal state and the
    last ``conv_kernel_size - 1`` inputs of its Q, K and V channels,
    ``num_v_heads * v_head_dim + 2 * num_k_heads * k_head_dim`` of them.

    Args:
      num_layers: recurrent layers.
      num_v_heads: value heads, each with a state of its own.
      v_head_dim: width of a value head.
      num_k_heads: query and key heads; `None` for as many as value heads.
      k_head_dim: width of a key head; `None` for that of a value head.
      conv_kernel_size: taps of the short convolution; 1 for none.
      state_dtype: of the temporal buffer.
      conv_dtype: of the conv buffer.
      tensor_size: devices that share the heads.

    Returns:
      bytes on each device.

    Raises:
      ValueError: a size is not positive, or heads do not divide among the devices.
    """
    num_k_heads = num_v_heads if num_k_heads is None else num_k_heads
    k_head_dim = v_head_dim if k_head_dim is None else k_head_dim
    _require_positive(
        num_layers=num_layers,
        num_v_heads=num_v_heads,
        v_head_dim=v_head_dim,
        num_k_heads=num_k_heads,
        k_head_dim=k_head_dim,
        conv_kernel_size=conv_kernel_size,
        tensor_size=tensor_size,
    )
    for name, heads in (("num_v_heads", num_v_heads), ("num_k_heads", num_k_heads)):
        if heads % tensor_size:
            raise ValueError(
                f"{name}={heads} with tensor_size={tensor_size}; wanted a multiple: "
                "recurrent heads are never replicated. Choose a tensor axis that "
                "divides both head counts."
            )
    v_heads, k_heads = num_v_heads // tensor_size, num_k_heads // tensor_size
    temporal = v_heads * k_head_dim * v_head_dim * _size(state_dtype)
    channels = v_heads * v_head_dim + 2 * k_heads * k_head_dim
    conv = (conv_kernel_size - 1) * channels * _size(conv_dtype)
    return num_layers * (temporal + conv)


def kda_slot_bytes(
    *, num_layers: int, num_heads: int, head_dim: int, conv_kernel_size: int, **more
) -> int:
    """Bytes of a KDA slot: Q, K and V have equal heads and widths.

    `more` is passed on to `recurrent_slot_bytes`: dtypes and `tensor_size`.
    """
    return recurrent_slot_bytes(
        num_layers=num_layers,
        num_v_heads=num_heads,
        v_head_dim=head_dim,
        conv_kernel_size=conv_kernel_size,
        **more,
    )


def gdn_slot_bytes(
    *,
    num_layers: int,
    num_v_heads: int,
    v_head_dim: int,
    num_k_heads: int,
    k_head_dim: int,
    conv_kernel_size: int,
    **more,
) -> int:
    """Bytes of a GDN slot: K and V may differ in head count and in head width.

    `more` is passed on to `recurrent_slot_bytes`: dtypes and `tensor_size`.
    """
    return recurrent_slot_bytes(
        num_layers=num_layers,
        num_v_heads=num_v_heads,
        v_head_dim=v_head_dim,
        num_k_heads=num_k_heads,
        k_head_dim=k_head_dim,
        conv_kernel_size=conv_kernel_size,
        **more,
    )


def gla_slot_bytes(*, num_layers: int, num_heads: int, head_dim: int, **more) -> int:
    """Bytes of a GLA (Lightning) slot: no convolution.

    `more` is passed on to `recurrent_slot_bytes`: `state_dtype` and `tensor_size`.
    """
    return recurrent_slot_bytes(
        num_layers=num_layers, num_v_heads=num_heads, v_head_dim=head_dim, **more
    )


def _size(dtype) -> int:
    return jnp.dtype(dtype).itemsize


def _packing(dtype) -> int:
    return max(1, WORD_BYTES // _size(dtype))


def _require_positive(**sizes) -> None:
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(
                f"{name}={size!r}; wanted a positive integer. Read it from the "
                "model's configuration."
            )
