"""When and how far a request may let go of its own SWA pages.

Lengths are in tokens. Inputs are int32 arrays of one shape, or Python ints; `window`,
`page_size` and `extra_pages` are static.
"""

import jax.numpy as jnp


def swa_frontier(published_length, window: int, page_size: int, extra_pages: int = 1):
    """Length below which a request may free its own SWA pages.

    It keeps what covers the window before the last boundary that will be published,
    and `extra_pages` more: a later request that diverges inside the last page then
    still finds, a page earlier, a boundary whose window is whole. Counting from the
    live position instead would lose the window of a prefix that is published shorter
    than what was computed (cut to a snapshot, or to whole pages).

    Args:
      published_length: tokens that the request will publish if it ends now.
      window: `sliding_window_size`.
      page_size: tokens a page.
      extra_pages: boundaries before the last one to keep servable.

    Returns:
      int32, a multiple of `page_size`, at least 0; it never falls as
      `published_length` grows.

    Raises:
      ValueError: `window` or `page_size` is not positive, or `extra_pages` negative.
    """
    if window < 1 or page_size < 1 or extra_pages < 0:
        raise ValueError(
            f"window={window}, page_size={page_size}, extra_pages={extra_pages}; "
            "wanted positive sizes and no negative count. Take them from the config."
        )
    kept = -(-window // page_size) + extra_pages
    pages = jnp.asarray(published_length, jnp.int32) // page_size
    return jnp.maximum(pages - kept, 0) * page_size


def swa_release_range(frontier, swa_evicted_seqlen, protected_length):
    """Tokens whose SWA pages a request frees as it slides.

    Args:
      frontier: `swa_frontier` of the request.
      swa_evicted_seqlen: tokens whose SWA pages it has let go before.
      protected_length: tokens that the tree owns; the request must not free those.

    Returns:
      ``(start, end, evicted)``, int32: free the pages of ``[start, end)``, perhaps
      none; `evicted` is the next `swa_evicted_seqlen`.
    """
    frontier = jnp.asarray(frontier, jnp.int32)
    evicted = jnp.asarray(swa_evicted_seqlen, jnp.int32)
    start = jnp.maximum(evicted, jnp.asarray(protected_length, jnp.int32))
    return start, jnp.maximum(start, frontier), jnp.maximum(evicted, frontier)


def must_slide(free_pages, outside_pages, chunk_pages):
    """Whether a prefill must let go of pages before its next chunk.

    It must as soon as free pages and those of the tree that lie outside every window
    do not cover the chunk: a page outside a window never displaces one inside.

    Args:
      free_pages: SWA pages in the free list.
      outside_pages: unlocked SWA pages of the tree that serve no window.
      chunk_pages: SWA pages that the next chunk takes.

    Returns:
      bool.
    """
    room = jnp.asarray(free_pages, jnp.int32) + jnp.asarray(outside_pages, jnp.int32)
    return room < jnp.asarray(chunk_pages, jnp.int32)
