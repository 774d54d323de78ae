"""A drafter sees nothing below ``first_valid`` (serving contracts, sections 4.1 and 4.2).

Other engines hide whole blocks: they shift a request's block table to the left and shorten its length. Ours names the
first valid position and lists slots from there on, exact to the token. Both are tested against each other: where the
cached length ends on a block they see the same slots, elsewhere ours hides what a shift cannot.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.cache.allocator import WINDOW_PAGE_TOKENS, SlotPool
from dspark_jax.config import EngineConfig
from dspark_jax.engine.buckets import StepShapes
from dspark_jax.engine.request import Request
from dspark_jax.engine.runner import ModelRunner
from dspark_jax.engine.scheduler import Sequence
from dspark_jax.models.rows import trailing_window
from dspark_jax.sampling_params import SamplingParams
from dspark_jax.spec_decode.staging import DraftCapacities
from dspark_jax.testing import Session

BLOCK = 16


def shift_of(num_cached, block=BLOCK):
    """Whole blocks that the shifting rule hides."""
    return num_cached // block


def is_unaligned(num_cached, block=BLOCK):
    """Whether the shifting rule must not draft for this batch: a part of a block stays visible."""
    return any(n % block for n in num_cached)


@functools.partial(jax.jit, static_argnames=("block",), donate_argnums=0)
def shift_row(row, shift, length, block=BLOCK):
    """A table row moved left by ``shift`` blocks, as far as ``length`` tokens need. In place, but every entry is read
    before any is written."""
    index = jnp.arange(row.shape[0])
    moved = row[jnp.minimum(index + shift, row.shape[0] - 1)]
    return jnp.where(index < -(-length // block), moved, row)


listing = jax.jit(trailing_window, static_argnums=2)


def seen(table, end, window, first, block=WINDOW_PAGE_TOKENS):
    """The slots that rows ending before ``end`` list, per request."""
    slots, counts = listing(jnp.asarray(table), jnp.asarray(end), window, jnp.asarray(first))
    return [np.asarray(s)[:n].tolist() for s, n in zip(slots, np.asarray(counts), strict=True)]


@pytest.mark.contract("PM-1")
def test_shifts():
    cached = [0, 15, 31, 32, 33, 47, 48, 49, 53]
    assert [shift_of(n) for n in cached] == [0, 0, 1, 2, 2, 2, 3, 3, 3]
    # The same lengths in our pages: at most the partial block is hidden beyond what the shift hides.
    table = np.arange(1, 9, dtype=np.int32)[None]
    for n in cached:
        first = n * WINDOW_PAGE_TOKENS // BLOCK
        (slots,) = seen(table, [512], 512, [first])
        assert slots == list(range(WINDOW_PAGE_TOKENS + first, WINDOW_PAGE_TOKENS + 512))
        assert slots[0] // WINDOW_PAGE_TOKENS - 1 == shift_of(n)


@pytest.mark.contract("PM-2")
def test_a_partial_block_is_hidden_to_the_token():
    aligned = {n: not is_unaligned([n]) for n in (32, 48, 31, 33, 35, 47, 49)}
    assert aligned == {32: True, 48: True, 31: False, 33: False, 35: False, 47: False, 49: False}
    assert is_unaligned([32, 35])
    assert not is_unaligned([32, 64])
    # Where the shift must give up, nothing below the cached length is listed either.
    table = np.arange(1, 17, dtype=np.int32).reshape(2, 8)
    for cached in ([32, 35], [32, 64], [31, 49]):
        lists = seen(table, [100, 100], 512, cached)
        assert [s[0] for s in lists] == [64 + cached[0], 9 * 64 + cached[1]]
        assert [len(s) for s in lists] == [100 - n for n in cached]


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 7), st.integers(1, 511), st.sampled_from([1, 32, 128, 200, 512]))
def test_shifting_and_masking_see_the_same_slots(shift, end, window):
    block, table = WINDOW_PAGE_TOKENS, np.arange(8, dtype=np.int32) + 1
    end = max(end, shift * block)
    shortened = end - shift * block
    moved = np.asarray(shift_row(jnp.asarray(table), shift, shortened, block=block))
    assert seen(moved[None], [shortened], window, [0]) == seen(table[None], [end], window, [shift * block])


@pytest.mark.contract("PM-3")
def test_the_mask_follows_the_request_not_the_batch_order(models):
    model, engine = models("dspark"), EngineConfig(max_num_seqs=4, max_model_len=512)
    shapes = StepShapes.create(model.config, engine)
    runner = ModelRunner(model, engine, shapes, DraftCapacities(SlotPool(4), 3), allocate=False)
    sequences = []
    for slot in (3, 2, 1, 0):  # i cached blocks in slot i
        sequence = Sequence(Request(str(slot), (9,), SamplingParams()), 0, [9], slot=slot, first_valid=slot * BLOCK)
        sequences.append(sequence)
    batch = runner._decode_batch(sequences, 4)
    assert batch.slot.tolist() == [3, 2, 1, 0]
    assert batch.first_valid.tolist() == [48, 32, 16, 0]
    table = np.arange(4 * 8, dtype=np.int32).reshape(4, 8) + 1
    lists = seen(table, [64] * 4, 64, batch.first_valid)
    assert [64 - len(s) for s in lists] == [slot * BLOCK for slot in (3, 2, 1, 0)]


@pytest.mark.contract("PM-4")
def test_only_entries_that_the_shortened_length_needs_move():
    row = np.arange(100, 116, dtype=np.int32)
    moved = np.asarray(shift_row(jnp.asarray(row), 4, int(3.5 * BLOCK)))
    assert moved.tolist() == [*row[4:8], *row[4:]]


@pytest.mark.contract("PM-5")
def test_overlapping_rows_move_whole(rng):
    for _ in range(100):
        row = rng.integers(0, 2**31, 4096, dtype=np.int32)
        moved = shift_row(jnp.array(row), 7, (4096 - 7) * BLOCK)
        np.testing.assert_array_equal(moved, np.concatenate([row[7:], row[-7:]]))


@pytest.mark.contract("PM-6")
def test_rows_that_were_never_written_are_not_read(models):
    """A warm request's drafter: the rows of the restored prefix hold NaN. Drafts, logits and confidences are finite and
    those of a drafter that was only ever given the suffix."""
    rng = np.random.default_rng(3)
    model = models("dspark", "exact", "float32")
    tokens = rng.integers(8, 320, 100)
    session = Session(model, 256)
    taps = session.extend(tokens).taps
    position, anchor = 100, 17
    for first in (0, 75, 96, 99, 100):
        session.drafter = jax.tree.map(jnp.zeros_like, session.drafter)
        if first < position:
            session.commit(taps[first:], first)
        suffix = session.draft(anchor, position, first_valid=first)
        want = [*session.markov(suffix, [anchor] * 3), np.asarray(suffix.hidden)]
        session.drafter = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), session.drafter)
        if first < position:
            session.commit(taps[first:], first)
        warm = session.draft(anchor, position, first_valid=first)
        got = [*session.markov(warm, [anchor] * 3), np.asarray(warm.hidden)]
        for a, b in zip(got, want, strict=True):
            assert np.isfinite(a).all()
            np.testing.assert_array_equal(a, b)
        if first - 1 >= 69:  # inside the window of 32: without the mask the NaN is seen
            seen_anyway = session.draft(anchor, position, first_valid=first - 1)
            assert not np.isfinite(np.asarray(seen_anyway.hidden)).all()


@pytest.mark.contract("PM-7")
def test_the_window_clips_once_for_every_cache_group():
    """Two groups, 8 blocks, a window of 4: both list the last 4 blocks of their own table."""
    tables = np.stack([np.arange(8), np.arange(8) + 8]).astype(np.int32)
    scale = WINDOW_PAGE_TOKENS // BLOCK
    slots, counts = trailing_window(jnp.asarray(tables), jnp.asarray([8 * 64] * 2), 4 * 64, jnp.asarray([0, 0]))
    assert (np.asarray(counts) // scale).tolist() == [64, 64]
    assert (np.asarray(slots)[:, ::64] // 64).tolist() == [[4, 5, 6, 7], [12, 13, 14, 15]]
