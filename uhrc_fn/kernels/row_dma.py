"""Rows moved inside donated buffers on a TPU: what its kernels share.

Nothing passes through the core: a DMA takes a row from HBM to HBM, read once and
written once. The buffers stay where they are, aliased to the outputs.
"""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# A tile is 128 lanes by 8 sublanes of a word, or by 1, 2 or 4 of them. Where a row
# fills whole tiles, the TPU stores the rows one after another, and one DMA moves one.
LANES = 128
SUBLANES = 8
WORD_BYTES = 4


def fills_tiles(buffer: jax.Array) -> bool:
    """Whether the rows of `buffer` lie apart in the TPU's own layout.

    Where the last axis is narrow, such as the taps of a convolution, the TPU lays rows
    side by side within a tile. A kernel would have the whole buffer laid out anew.
    """
    if buffer.ndim < 3 or buffer.size == 0:
        return False
    sublanes, lanes = buffer.shape[-2:]
    is_low_tile = sublanes in (1, 2, 4)
    fills_words = sublanes * buffer.dtype.itemsize % WORD_BYTES == 0
    return lanes % LANES == 0 and (
        sublanes % SUBLANES == 0 or (is_low_tile and fills_words)
    )


def move_rows(
    sources: Sequence[jax.Array] | None,
    buffers: Sequence[jax.Array],
    source_rows: jax.Array,
    buffer_rows: jax.Array,
    *,
    name: str,
    interpret: bool | pltpu.InterpretParams = False,
) -> list[jax.Array]:
    """Copy row `source_rows[i]` of each source to row `buffer_rows[i]` of its buffer.

    Args:
      sources: arrays to read, one a buffer; `None`: the buffers themselves.
      buffers: [rows, ...] arrays. One kernel moves the rows of all that fill tiles;
        the rest are narrow, and XLA moves their rows in place one by one.
      source_rows: int32 [lanes].
      buffer_rows: int32 [lanes]; 0 moves nothing. Distinct otherwise, and where the
        buffers are the sources none is a source row of another lane.
      name: of the kernel, to find it in the compiled text.
      interpret: for tests on the CPU.

    Returns:
      The buffers; in place if they were donated.
    """
    moved = list(buffers)
    if source_rows.size == 0:
        return moved
    for by_dma in (True, False):
        places = [i for i, b in enumerate(buffers) if fills_tiles(b) == by_dma]
        if not places:
            continue
        move = _by_slices
        if by_dma:
            move = functools.partial(_by_dma, name=name, interpret=interpret)
        group = move(
            None if sources is None else [sources[i] for i in places],
            [buffers[i] for i in places],
            source_rows,
            buffer_rows,
        )
        for place, buffer in zip(places, group, strict=True):
            moved[place] = buffer
    return moved


def _by_slices(sources, buffers, source_rows, buffer_rows):
    """Read and write one row at a time: a scatter would lay the buffer out anew.

    The loop ends behind the last lane with work: where nobody has any it costs nothing.
    """
    # A lane without work writes row 0 as it is. If new rows come from elsewhere, that
    # row is read once, before the loop: read inside, XLA would lay it out as they are,
    # and the whole buffer with it.
    if sources is None:
        source_rows = jnp.where(buffer_rows > 0, source_rows, 0)
    dummies = [buffer[:1] for buffer in buffers]
    behind = jnp.arange(1, buffer_rows.size + 1, dtype=jnp.int32)
    end = jnp.max(jnp.where(buffer_rows > 0, behind, 0))

    def move_row(lane, buffers):
        read = jax.lax.dynamic_index_in_dim(source_rows, lane, keepdims=False)
        write = jax.lax.dynamic_index_in_dim(buffer_rows, lane, keepdims=False)
        moved = []
        for place, buffer in enumerate(buffers):
            source = buffer if sources is None else sources[place]
            row = jax.lax.dynamic_slice_in_dim(source, read, 1)
            if sources is not None:
                row = jnp.where(write > 0, row, dummies[place])
            moved.append(jax.lax.dynamic_update_slice_in_dim(buffer, row, write, 0))
        return moved

    if buffer_rows.size == 1:
        return move_row(jnp.int32(0), list(buffers))
    return jax.lax.fori_loop(jnp.int32(0), end, move_row, list(buffers))


def _by_dma(sources, buffers, source_rows, buffer_rows, *, name: str, interpret):
    sources = [] if sources is None else sources
    num_buffers = len(buffers)
    first_buffer = 2 + len(sources)  # behind the two index vectors
    anywhere = pl.BlockSpec(memory_space=pl.ANY)
    kernel = functools.partial(
        _kernel, num_sources=len(sources), num_buffers=num_buffers
    )
    moved = pl.pallas_call(
        kernel,
        # The whole type, so that it says over which mesh axes a shard varies too.
        out_shape=[jax.typeof(buffer) for buffer in buffers],
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(1,),
            in_specs=[anywhere] * (len(sources) + num_buffers),
            out_specs=[anywhere] * num_buffers,
            scratch_shapes=[pltpu.SemaphoreType.DMA(())],
        ),
        input_output_aliases={first_buffer + i: i for i in range(num_buffers)},
        interpret=interpret,
        name=name,
    )(source_rows, buffer_rows, *sources, *buffers)
    return list(moved)


def _kernel(source_rows, buffer_rows, *refs, num_sources: int, num_buffers: int):
    """Start every DMA, then wait for all of them.

    Args:
      source_rows: SMEM [lanes].
      buffer_rows: SMEM [lanes].
      refs: HBM sources; HBM buffers, in and out (the same memory, so that only the
        outputs are touched); one semaphore, which counts the bytes of all.
      num_sources: static.
      num_buffers: static.
    """
    outputs = refs[num_sources + num_buffers : -1]
    sources = refs[:num_sources] or outputs
    arrived = refs[-1]

    def each_live_row(act):
        def one_lane(lane, carry):
            @pl.when(buffer_rows[lane] > 0)
            def _():
                for source, output in zip(sources, outputs, strict=True):
                    read = source.at[source_rows[lane]]
                    write = output.at[buffer_rows[lane]]
                    act(pltpu.make_async_copy(read, write, arrived))

            return carry

        jax.lax.fori_loop(jnp.int32(0), jnp.int32(source_rows.size), one_lane, None)

    each_live_row(lambda copy: copy.start())
    each_live_row(lambda copy: copy.wait())
