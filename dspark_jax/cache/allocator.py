"""Pages and request slots on the host: which are free, and who holds the others."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Iterable

NULL_PAGE = 0
# A logical block of compressed entries: 256 tokens, that is 64 rows of ratio 4 and 2 of ratio 128.
BLOCK_TOKENS = 256
WINDOW_PAGE_TOKENS = 64


class OutOfPagesError(RuntimeError):
    """The pool has fewer free pages than were asked for. Nothing was allocated."""


class PagePool:
    """A fixed set of pages, numbered from 1, with counted holders: page 0 is the null page that unused table entries
    point at.

    It is never handed out, so a read through an unused entry can only meet masked rows and no request ever writes it.
    A page that is ``kept`` survives its last holder, for others to ``share``, until the pool runs short of free pages:
    then the one that was let go longest ago is evicted, after ``on_evict`` was told. Kept pages that nobody holds
    count as free.
    """

    def __init__(self, name: str, num_pages: int):
        if num_pages < 2:
            raise ValueError(f"{name}: expected at least 2 pages (page 0 is reserved), got {num_pages}")
        self.name = name
        self.num_pages = num_pages
        self.on_evict: Callable[[int], None] = lambda page: None
        self._free = deque(range(1, num_pages))
        self._holders: dict[int, int] = {}
        self._kept: set[int] = set()
        self._idle: OrderedDict[int, None] = OrderedDict()  # kept and held by nobody, longest first

    @property
    def num_free(self) -> int:
        """Pages that ``allocate`` can hand out, those included that it would evict."""
        return len(self._free) + len(self._idle)

    @property
    def num_kept(self) -> int:
        return len(self._kept)

    @property
    def capacity(self) -> int:
        """Pages that can be handed out in all."""
        return self.num_pages - 1

    def holders(self, page: int) -> int:
        return self._holders.get(page, 0)

    def allocate(self, count: int) -> list[int]:
        """``count`` pages with one holder each. Raises ``OutOfPagesError`` (and allocates none) if fewer are free."""
        if count > self.num_free:
            raise OutOfPagesError(f"{self.name}: {count} pages asked for, {self.num_free} of {self.capacity} free")
        while len(self._free) < count:
            page = next(iter(self._idle))
            self.on_evict(page)
            self.drop(page)
        pages = [self._free.popleft() for _ in range(count)]
        self._holders.update(dict.fromkeys(pages, 1))
        return pages

    def share(self, pages: Iterable[int]) -> None:
        """One more holder for each page. Raises ``ValueError`` for a page that is neither held nor kept."""
        for page in pages:
            if page not in self._holders and page not in self._idle:
                raise ValueError(f"{self.name}: page {page} is neither held nor kept")
            self._idle.pop(page, None)
            self._holders[page] = self.holders(page) + 1

    def release(self, pages: Iterable[int]) -> None:
        """One holder less for each page. Raises ``ValueError`` for a page that is not held (a double free is a bug,
        never ignored)."""
        for page in pages:
            if page not in self._holders:
                raise ValueError(f"{self.name}: page {page} is not held")
            self._holders[page] -= 1
            if not self._holders[page]:
                del self._holders[page]
                if page in self._kept:
                    self._idle[page] = None
                else:
                    self._free.append(page)

    def keep(self, page: int) -> None:
        """Lets a held page survive its last holder. Raises ``ValueError`` if nobody holds it."""
        if page not in self._holders:
            raise ValueError(f"{self.name}: page {page} is not held")
        self._kept.add(page)

    def drop(self, page: int) -> None:
        """Ends ``keep``: the page is free once nobody holds it. Pages that are not kept are ignored."""
        self._kept.discard(page)
        if page in self._idle:
            del self._idle[page]
            self._free.append(page)


class SlotPool:
    """Request slots with generations: ``(slot, generation)`` names one tenancy, so a late result of a former tenant
    (even of the same request, come back) is told apart."""

    def __init__(self, num_slots: int):
        self.num_slots = num_slots
        self._free = deque(range(num_slots))
        self._generation = [0] * num_slots
        self._held: set[int] = set()

    @property
    def num_free(self) -> int:
        return len(self._free)

    def acquire(self) -> tuple[int, int]:
        """A free slot and its new generation. Raises ``IndexError`` if there is none."""
        slot = self._free.popleft()
        self._held.add(slot)
        self._generation[slot] += 1
        return slot, self._generation[slot]

    def release(self, slot: int) -> None:
        """Raises ``ValueError`` for a slot that is not held."""
        if slot not in self._held:
            raise ValueError(f"slot {slot} is not held")
        self._held.remove(slot)
        self._free.append(slot)

    def is_current(self, slot: int, generation: int) -> bool:
        """Whether the tenancy is the slot's present one."""
        return slot in self._held and self._generation[slot] == generation
