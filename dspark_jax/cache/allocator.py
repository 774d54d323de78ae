"""Page allocation on the host: which physical pages are free, and who holds the others."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

NULL_PAGE = 0
# A logical block of compressed entries: 256 tokens, that is 64 rows of ratio 4 and 2 of ratio 128.
BLOCK_TOKENS = 256
WINDOW_PAGE_TOKENS = 64


class OutOfPagesError(RuntimeError):
    """The pool has fewer free pages than were asked for. Nothing was allocated."""


class PagePool:
    """A fixed set of pages, numbered from 1: page 0 is the null page that unused table entries point at.

    It is never handed out, so a read through an unused entry can only meet masked rows and no request ever writes it.
    Pages are reused oldest-freed first.
    """

    def __init__(self, name: str, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"{name}: expected at least 2 pages (page 0 is reserved), got {num_pages}")
        self.name = name
        self.num_pages = num_pages
        self._free = deque(range(1, num_pages))
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def capacity(self) -> int:
        """Pages that can be handed out in all."""
        return self.num_pages - 1

    def allocate(self, count: int) -> list[int]:
        """``count`` pages. Raises ``OutOfPagesError`` (and allocates none) if fewer are free."""
        if count > len(self._free):
            raise OutOfPagesError(f"{self.name}: {count} pages asked for, {len(self._free)} of {self.capacity} free")
        pages = [self._free.popleft() for _ in range(count)]
        self._held.update(pages)
        return pages

    def release(self, pages: Iterable[int]) -> None:
        """Gives pages back. Raises ``ValueError`` for a page that is not held (a double free is a bug, never
        ignored)."""
        for page in pages:
            if page not in self._held:
                raise ValueError(f"{self.name}: page {page} is not held")
            self._held.remove(page)
            self._free.append(page)
