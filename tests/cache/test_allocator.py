"""The page pool hands out each page once and notices every misuse."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.cache.allocator import NULL_PAGE, OutOfPagesError, PagePool


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
