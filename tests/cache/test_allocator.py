"""The page pool hands out each page once and notices every misuse."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from dspark_jax.cache.allocator import NULL_PAGE, OutOfPagesError, PagePool, SlotPool


@given(st.integers(2, 40), st.lists(st.tuples(st.booleans(), st.integers(0, 12)), max_size=60))
def test_pages_are_disjoint_and_conserved(num_pages, operations):
    pool, held = PagePool("test", num_pages), []
    for take, count in operations:
        if take:
            free = pool.num_free
            if count > free:
                with pytest.raises(OutOfPagesError, match=f"{count} pages asked for, {free} of"):
                    pool.allocate(count)
                assert pool.num_free == free
            else:
                pages = pool.allocate(count)
                assert NULL_PAGE not in pages
                assert not set(pages) & set(held)
                held += pages
        else:
            back, held = held[:count], held[count:]
            pool.release(back)
        assert pool.num_free + len(held) == pool.capacity
        assert len(set(held)) == len(held)


def test_double_free_is_an_error():
    pool = PagePool("test", 4)
    (page,) = pool.allocate(1)
    pool.release([page])
    with pytest.raises(ValueError, match=f"test: page {page} is not held"):
        pool.release([page])
    with pytest.raises(ValueError, match="page 0 is not held"):
        pool.release([NULL_PAGE])


def test_a_pool_needs_a_page_beside_the_null_page():
    with pytest.raises(ValueError, match=r"at least 2 pages .* got 1"):
        PagePool("test", 1)


class SharedPages(RuleBasedStateMachine):
    """A pool against a model of it: a dict of holders and a list of kept pages in the order they were let go."""

    @initialize(num_pages=st.integers(2, 12))
    def start(self, num_pages):
        self.pool = PagePool("test", num_pages)
        self.evicted: list[int] = []
        self.pool.on_evict = self.evicted.append
        self.holders: dict[int, int] = {}
        self.kept: set[int] = set()
        self.idle: list[int] = []

    def some(self, data, pages):
        return data.draw(st.sampled_from(sorted(pages)))

    @rule(count=st.integers(0, 6))
    def allocate(self, count):
        never = self.pool.capacity - len(self.holders) - len(self.idle)
        if count > never + len(self.idle):
            with pytest.raises(OutOfPagesError):
                self.pool.allocate(count)
            return
        before = len(self.evicted)
        pages = self.pool.allocate(count)
        victims = self.idle[: max(0, count - never)]
        assert self.evicted[before:] == victims, "evicted first: what was let go longest ago, and no more than needed"
        self.idle = self.idle[len(victims) :]
        self.kept -= set(victims)
        assert NULL_PAGE not in pages
        assert not set(pages) & (set(self.holders) | set(self.idle))
        self.holders |= dict.fromkeys(pages, 1)

    @precondition(lambda self: self.holders or self.idle)
    @rule(data=st.data())
    def share(self, data):
        page = self.some(data, {*self.holders, *self.idle})
        self.pool.share([page])
        self.holders[page] = self.holders.get(page, 0) + 1
        self.idle = [p for p in self.idle if p != page]

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data):
        page = self.some(data, self.holders)
        self.pool.release([page])
        self.holders[page] -= 1
        if not self.holders[page]:
            del self.holders[page]
            if page in self.kept:
                self.idle.append(page)

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def keep(self, data):
        page = self.some(data, self.holders)
        self.pool.keep(page)
        self.kept.add(page)

    @rule(data=st.data())
    def drop(self, data):
        page = data.draw(st.integers(1, self.pool.capacity))
        self.pool.drop(page)
        self.kept.discard(page)
        self.idle = [p for p in self.idle if p != page]

    @rule(page=st.integers(0, 12))
    def misuse(self, page):
        if page not in self.holders:
            for use in (lambda: self.pool.release([page]), lambda: self.pool.keep(page)):
                with pytest.raises(ValueError, match=f"test: page {page} is not held"):
                    use()
            if page not in self.idle:
                with pytest.raises(ValueError, match="neither held nor kept"):
                    self.pool.share([page])

    @invariant()
    def figures(self):
        assert self.pool.num_free == self.pool.capacity - len(self.holders)
        assert self.pool.num_kept == len(self.kept)
        assert all(self.pool.holders(page) == count for page, count in self.holders.items())


SharedPages.TestCase.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)
TestSharedPages = SharedPages.TestCase


@given(st.integers(1, 6), st.lists(st.integers(0, 7), max_size=60))
def test_a_tenancy_is_never_current_twice(num_slots, operations):
    pool, tenants, ended = SlotPool(num_slots), [], []
    for operation in operations:
        if operation < 4 and pool.num_free:
            tenancy = pool.acquire()
            assert tenancy not in tenants + ended
            assert tenancy[0] not in [slot for slot, _ in tenants]
            tenants.append(tenancy)
        elif tenants:
            ended.append(tenants.pop(operation % len(tenants)))
            pool.release(ended[-1][0])
        assert pool.num_free == num_slots - len(tenants)
        assert all(pool.is_current(*tenancy) for tenancy in tenants)
        assert not any(pool.is_current(*tenancy) for tenancy in ended)
    if not pool.num_free:
        with pytest.raises(IndexError):
            pool.acquire()
    for slot in set(range(num_slots)) - {slot for slot, _ in tenants}:
        with pytest.raises(ValueError, match=f"slot {slot} is not held"):
            pool.release(slot)
