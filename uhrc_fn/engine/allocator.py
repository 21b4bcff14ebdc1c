"""Free lists of the legacy caches: plain host Python, one list a rank.

The unified cache has none of this: its free lists are part of its state.
"""

from collections import deque

import numpy as np

from .params import NO_INDICES, Locations


class PageAllocator:
    """Pages of one pool, handed out as token locations.

    Args:
      num_pages: usable pages of each rank; page 0 is the dummy.
      page_size: tokens a page.
      dp_size: ranks.

    Free lists are first in, first out. Freeing any location of a page frees the page;
    freeing what is free already is refused.
    """

    supports_swa = False

    def __init__(self, num_pages: int, page_size: int = 1, dp_size: int = 1):
        if min(num_pages, page_size, dp_size) < 1:
            raise ValueError(
                f"num_pages={num_pages}, page_size={page_size}, dp_size={dp_size}; "
                "wanted positive counts. Size the pool by the memory at hand."
            )
        self.num_pages = num_pages
        self.page_size = page_size
        self.dp_size = dp_size
        self.clear()

    def clear(self) -> None:
        """Everything is free again."""
        pages = range(1, self.num_pages + 1)
        self.free_pages = [deque(pages) for _ in range(self.dp_size)]
        self.is_free = np.ones((self.dp_size, self.num_pages + 1), bool)
        self.is_free[:, 0] = False

    def available_size(self, dp_rank: int = 0) -> int:
        """Free tokens of a rank."""
        return len(self.free_pages[dp_rank]) * self.page_size

    def deficit(self, num_tokens: int, dp_rank: int = 0) -> tuple[int, int]:
        """Tokens to evict, ``(FULL, SWA)``, before so many can be given."""
        return max(self.pages_of(num_tokens) - self.available_size(dp_rank), 0), 0

    def pages_of(self, num_tokens: int) -> int:
        """`num_tokens` rounded up to whole pages, in tokens."""
        return -(-num_tokens // self.page_size) * self.page_size

    def alloc(self, num_tokens: int, dp_rank: int = 0) -> Locations | None:
        """Give whole pages for so many tokens; None, and no change, where short."""
        wanted = self.pages_of(num_tokens)
        if wanted > self.available_size(dp_rank):
            return None
        free = self.free_pages[dp_rank]
        ids = [free.popleft() for _ in range(wanted // self.page_size)]
        pages = np.asarray(ids, np.int32)
        self.is_free[dp_rank, pages] = False
        offsets = np.arange(self.page_size, dtype=np.int32)
        full = (pages[:, None] * self.page_size + offsets).reshape(-1)
        return Locations(full)

    def free(self, indices, dp_rank: int = 0) -> None:
        """Return the pages of these locations; 0 is padding.

        Raises:
          ValueError: a page is outside the pool or free already; nothing was freed.
        """
        pages = self.used_pages(indices, dp_rank)
        self.is_free[dp_rank, pages] = True
        self.free_pages[dp_rank].extend(pages.tolist())

    def used_pages(self, indices, dp_rank: int) -> np.ndarray:
        """Pages of locations, in order of appearance; checks that all are in use."""
        indices = np.asarray(indices)
        if indices.size == 0:
            return NO_INDICES
        pages, first = np.unique(indices // self.page_size, return_index=True)
        pages = pages[np.argsort(first)]
        pages = pages[pages != 0]
        ok = (pages > 0) & (pages <= self.num_pages)
        ok[ok] = ~self.is_free[dp_rank, pages[ok]]
        if not ok.all():
            raise ValueError(
                f"page {pages[~ok][0]} of rank {dp_rank} is free already or outside "
                f"its pool of {self.num_pages}; wanted pages in use. Free each once, "
                "and never what the tree holds."
            )
        return pages


class SWAPageAllocator(PageAllocator):
    """FULL and SWA pages that go together, until a window lets the SWA one go.

    Args:
      num_pages: usable FULL pages of each rank.
      num_swa_pages: usable SWA pages of each rank.
      page_size: tokens a page.
      dp_size: ranks.
    """

    supports_swa = True

    def __init__(
        self, num_pages: int, num_swa_pages: int, page_size: int = 1, dp_size: int = 1
    ):
        self.swa = PageAllocator(num_swa_pages, page_size, dp_size)
        super().__init__(num_pages, page_size, dp_size)

    def clear(self) -> None:
        """Everything is free again."""
        super().clear()
        self.swa.clear()
        # Pages, not tokens: a page's SWA twin is let go as a whole.
        self.swa_page_of = np.zeros((self.dp_size, self.num_pages + 1), np.int32)

    def swa_available_size(self, dp_rank: int = 0) -> int:
        """Free SWA tokens of a rank."""
        return self.swa.available_size(dp_rank)

    def deficit(self, num_tokens: int, dp_rank: int = 0) -> tuple[int, int]:
        """Tokens to evict, ``(FULL, SWA)``, before so many can be given."""
        full, _ = super().deficit(num_tokens, dp_rank)
        return full, self.swa.deficit(num_tokens, dp_rank)[0]

    def alloc(self, num_tokens: int, dp_rank: int = 0) -> Locations | None:
        """Give pages of both pools; None, and no change, where either is short."""
        if any(self.deficit(num_tokens, dp_rank)):
            return None
        full, swa = (
            super().alloc(num_tokens, dp_rank),
            self.swa.alloc(num_tokens, dp_rank),
        )
        assert full is not None and swa is not None
        size = self.page_size
        pages, swa_pages = full.full[::size] // size, swa.full[::size] // size
        self.swa_page_of[dp_rank, pages] = swa_pages
        return Locations(full.full, swa.full)

    def to_swa(self, indices, dp_rank: int = 0) -> np.ndarray:
        """SWA locations of FULL locations, 0 where there is none."""
        indices = np.asarray(indices, np.int32)
        page = self.swa_page_of[dp_rank, indices // self.page_size]
        return np.where(page > 0, page * self.page_size + indices % self.page_size, 0)

    def free(self, indices, dp_rank: int = 0) -> None:
        """Return FULL pages, and what they still have of SWA; 0 is padding."""
        pages = self.used_pages(indices, dp_rank)
        self.free_swa(pages * self.page_size, dp_rank)
        super().free(indices, dp_rank)

    def free_swa(self, indices, dp_rank: int = 0) -> None:
        """Return the SWA twins of FULL locations; nothing where they are gone."""
        pages = np.unique(np.asarray(indices, np.int32) // self.page_size)
        twins = self.swa_page_of[dp_rank, pages]
        self.swa.free(twins[twins > 0] * self.page_size, dp_rank)
        self.swa_page_of[dp_rank, pages] = 0

    def move_swa(self, source, target, dp_rank: int = 0) -> None:
        """Hand the SWA twins of locations to others, which must have none."""
        size = self.page_size
        source = np.asarray(source, np.int32)[::size] // size
        target = np.asarray(target, np.int32)[::size] // size
        mapping = self.swa_page_of[dp_rank]
        if mapping[target].any() or len(source) != len(target):
            raise ValueError(
                "move_swa got targets with SWA pages of their own; wanted none. "
                "Free those first."
            )
        mapping[target] = mapping[source]
        mapping[source] = 0
