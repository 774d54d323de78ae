"""Pooling: any way of cutting a sequence into calls, with rollbacks, gives the entries of one pass."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pallas_kernels import compressor


def whole(kv, score, ratio):
    """float64 entries of a whole sequence, straight from the definition."""
    kv, score, entries = kv.astype(np.float64), score.astype(np.float64), []
    half = kv.shape[1] // 2
    for i in range(len(kv) // ratio):
        own = slice(i * ratio, (i + 1) * ratio)
        if ratio == 4:
            k, z = kv[own, half:], score[own, half:]
            if i:
                before = slice((i - 1) * 4, i * 4)
                k, z = np.concatenate([kv[before, :half], k]), np.concatenate([score[before, :half], z])
        else:
            k, z = kv[own], score[own]
        w = np.exp(z - z.max(0))
        entries.append((w * k).sum(0) / w.sum(0))
    return np.array(entries)


POOL = jax.jit(compressor.pool, static_argnames="ratio")
ROWS = (16, 160, 304)  # calls are padded to one of these, so that little is compiled


class Driver:
    """Feeds sequences to ``pool`` call by call and collects the entries of each."""

    def __init__(self, sequences, ratio, rollback):
        self.sequences, self.ratio = sequences, ratio
        slots, channels = len(sequences), sequences[0][0].shape[1]
        self.ring = jnp.full((slots, (2 * ratio if ratio == 4 else ratio) + rollback, 2, channels), jnp.nan)
        self.at = [0] * slots
        self.entries = [{} for _ in sequences]

    def call(self, counts):
        """One call with ``counts[b]`` new tokens of sequence b (in reverse order of slots) and padding behind."""
        pad = next(rows for rows in ROWS if rows >= sum(counts)) - sum(counts)
        order = list(range(len(counts)))[::-1]
        kv, score, request, first, row = [], [], [], [], 0
        for b, s in enumerate(order):
            span = slice(self.at[s], self.at[s] + counts[s])
            kv.append(self.sequences[s][0][span])
            score.append(self.sequences[s][1][span])
            request += [b] * counts[s]
            first.append(row)
            row += counts[s]
        kv, score = np.concatenate(kv), np.concatenate(score)
        pad_rows = [(0, pad), (0, 0)]

        def as_int(x):
            return jnp.asarray(np.array(x), jnp.int32)

        self.ring, pooled, owner, entry = POOL(
            self.ring,
            jnp.asarray(np.pad(kv, pad_rows, constant_values=np.nan)),
            jnp.asarray(np.pad(score, pad_rows, constant_values=np.nan)),
            slot=as_int([*order, -1]),  # and one padding request
            start=as_int([*(self.at[s] for s in order), 0]),
            first_row=as_int([*first, 0]),
            num_rows=as_int([*(counts[s] for s in order), 0]),
            row_request=as_int(request + [len(order)] * pad),
            ratio=self.ratio,
        )
        for value, b, i in zip(np.asarray(pooled), np.asarray(owner), np.asarray(entry), strict=True):
            if i >= 0:
                self.entries[order[b]][int(i)] = value
        for s, count in enumerate(counts):
            self.at[s] += count


def sequence(rng, length, channels=6):
    return tuple(rng.standard_normal((2, length, channels)).astype(np.float32))


def check(driver):
    for s, (kv, score) in enumerate(driver.sequences):
        want = whole(kv[: driver.at[s]], score[: driver.at[s]], driver.ratio)
        got = driver.entries[s]
        assert set(range(len(want))) <= set(got)
        for i, value in enumerate(want):
            np.testing.assert_allclose(got[i], value, atol=1e-5)


@pytest.mark.parametrize("ratio", [4, 128])
@pytest.mark.parametrize("chunk", [1, 5, 64, 300])
def test_any_chunk_size(rng, ratio, chunk):
    driver = Driver([sequence(rng, 300)], ratio, rollback=3)
    while driver.at[0] < 300:
        driver.call([min(chunk, 300 - driver.at[0])])
    check(driver)


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_batches_with_rollbacks(data):
    """Requests advance by different amounts, and some of the newest tokens are taken back and fed again changed."""
    ratio = data.draw(st.sampled_from([4, 128]))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    driver = Driver([sequence(rng, 700), sequence(rng, 700)], ratio, rollback=5)
    for _ in range(data.draw(st.integers(1, 8))):
        sizes = data.draw(st.lists(st.sampled_from([0, 1, 2, 6, 6, 70]), min_size=2, max_size=2))
        if not sum(sizes):
            continue
        driver.call(sizes)
        for s, size in enumerate(sizes):
            back = data.draw(st.integers(0, min(5, size)))
            driver.at[s] -= back
            for part in driver.sequences[s]:
                part[driver.at[s] : driver.at[s] + back] = rng.standard_normal((back, 6))
    check(driver)


def test_a_short_sequence_after_a_long_one_in_the_same_slot(rng):
    driver = Driver([sequence(rng, 40)], 4, rollback=5)
    driver.call([40])
    driver.sequences, driver.at, driver.entries = [sequence(rng, 7)], [0], [{}]
    driver.call([3])
    driver.call([4])
    check(driver)


def test_bad_arguments_are_named(rng):
    kv = jnp.zeros((4, 8))
    ints = {name: jnp.zeros(1, jnp.int32) for name in ("slot", "start", "first_row", "num_rows")}
    ints["row_request"] = jnp.zeros(4, jnp.int32)
    with pytest.raises(ValueError, match="ratio must be 4 or 128, got 8"):
        compressor.pool(jnp.zeros((1, 9, 2, 8)), kv, kv, **ints, ratio=8)
    with pytest.raises(ValueError, match="ring must hold at least 8 positions, got 7"):
        compressor.pool(jnp.zeros((1, 7, 2, 8)), kv, kv, **ints, ratio=4)
    with pytest.raises(ValueError, match=r"score must have shape \[4, 8\]"):
        compressor.pool(jnp.zeros((1, 9, 2, 8)), kv, kv[:3], **ints, ratio=4)
