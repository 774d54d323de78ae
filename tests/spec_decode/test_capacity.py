"""Verifier rows: how many there can be, how their keys are split, what that costs, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.spec_decode import capacity as module
from dspark_jax.spec_decode.capacity import (
    SplitPlan,
    check_decode_rows,
    chunk_limit,
    decode_regime_bound,
    draft_window_width,
    hca_width,
    peak_chunks,
    split_plan,
    verifier_row_capacity,
    workspace_bytes,
)

MIB = 2**20


@pytest.mark.contract("VR-1")
@pytest.mark.parametrize(
    ("max_num_seqs", "k", "budget", "capacity", "bound"),
    [
        (8, 5, 8192, 48, 256),
        (24, 5, 8192, 144, 256),
        (32, 7, 8192, 256, 256),
        (42, 5, 8192, 252, 256),
        (43, 5, 8192, 258, 258),
        (64, 5, 8192, 384, 384),
        (64, 7, 8192, 512, 512),
        (128, 5, 8192, 768, 768),
        (128, 7, 8192, 1024, 1024),
        (64, 5, 256, 256, 256),
        (64, 7, 300, 300, 300),
        (64, 0, 8192, None, 256),
    ],
)
def test_capacity(max_num_seqs, k, budget, capacity, bound):
    sizes = {"max_num_seqs": max_num_seqs, "num_drafts": k, "max_num_batched_tokens": budget}
    assert verifier_row_capacity(**sizes, method="dspark") == capacity
    assert decode_regime_bound(capacity) == bound
    for method in ("mtp", "none"):
        assert verifier_row_capacity(**sizes, method=method) is None


@pytest.mark.contract("VR-2")
@pytest.mark.parametrize(
    ("width", "fine", "finest", "coarse"),
    [
        (128, (64, 2), (12, 11), (1024, 1)),
        (384, (64, 6), (12, 32), (1024, 1)),
        (512, (64, 8), (12, 43), (1024, 1)),
        (640, (64, 10), (12, 54), (1024, 1)),
        (2176, (64, 34), (12, 182), (1024, 3)),
        (2560, (64, 40), (12, 214), (1024, 3)),
        (4224, (64, 66), (64, 66), (1024, 5)),
        (4608, (64, 72), (64, 72), (1024, 5)),
    ],
)
def test_plans(width, fine, finest, coarse):
    limit = chunk_limit(width)
    assert split_plan(256, width, max_chunks=limit) == SplitPlan(*fine)
    assert split_plan(256, width) == SplitPlan(*finest)
    assert split_plan(257, width, max_chunks=limit) == split_plan(257, width) == SplitPlan(*coarse)


@pytest.mark.contract("VR-2")
@pytest.mark.parametrize(("capacity", "last"), [(144, 256), (None, 256), (384, 384), (512, 512), (768, 768)])
def test_where_plans_turn_coarse(capacity, last):
    assert split_plan(last, 384, max_chunks=6, capacity=capacity) == SplitPlan(64, 6)
    assert split_plan(last + 1, 384, max_chunks=6, capacity=capacity) == SplitPlan(1024, 1)


@pytest.mark.contract("VR-2")
@pytest.mark.parametrize("capacity", [0, -1])
def test_a_capacity_must_be_positive(capacity):
    message = f"decode_row_capacity must be positive, got {capacity}"
    for function in (
        lambda: split_plan(6, 384, capacity=capacity),
        lambda: check_decode_rows("decode", 6, capacity),
        lambda: decode_regime_bound(capacity),
    ):
        with pytest.raises(ValueError, match=message):
            function()


def test_widths():
    assert hca_width(524_288) == 4096
    assert hca_width(1) == 128
    assert draft_window_width(128, 5) == 512
    assert draft_window_width(512, 5) == 1024


@pytest.mark.contract("VR-3")
def test_up_to_256_rows_a_capacity_changes_nothing():
    for rows, width, capacity in itertools.product((1, 24, 65, 144, 192, 256), (128, 384, 2176, 4608), (144, 384, 768)):
        for limit in (None, chunk_limit(width)):
            declared = split_plan(rows, width, max_chunks=limit, capacity=capacity)
            assert declared == split_plan(rows, width, max_chunks=limit)


CAUSAL, DRAFT = 128, draft_window_width(128, 5)
C128 = hca_width(524_288)


@pytest.mark.contract("VR-4")
@pytest.mark.parametrize(
    ("width", "heads", "capacity", "mib"),
    [
        (CAUSAL, 32, None, 64.502929688),
        (DRAFT, 32, 384, 96.627929688),
        (CAUSAL + 2048, 32, None, 273.315429688),
        (DRAFT + 2048, 32, 384, 482.127929688),
        (DRAFT + 2048, 32, None, 321.502929688),
        (CAUSAL + C128, 32, None, 530.315429688),
        (DRAFT + C128, 32, 384, 867.627929688),
        (DRAFT + C128, 32, None, 578.502929688),
        (CAUSAL + C128, 64, None, 1060.627929688),
    ],
)
def test_workspace(width, heads, capacity, mib):
    sizes = {"max_rows": 2048, "max_num_batched_tokens": 2048, "heads": heads}
    got = workspace_bytes(**sizes, width=width, max_chunks=chunk_limit(width), capacity=capacity)
    assert abs(got / MIB - mib) < 1e-6


@pytest.mark.contract("VR-4")
def test_the_peak_is_not_at_the_largest_step():
    """Reserving for 2,048 rows alone is too little for 232 rows, which are split 66 times."""
    width, limit = CAUSAL + C128, chunk_limit(CAUSAL + C128)

    def at(rows, chunks):
        sizes = [rows * chunks * 32 * 512 * 2, rows * chunks * 32 * 4, rows * 32 * 4, 4, 4, 4]
        return sum(-(-size // 1024) * 1024 for size in sizes) / MIB

    coarse = split_plan(2048, width, max_chunks=limit).num_chunks
    fine = split_plan(232, width, max_chunks=limit).num_chunks
    assert (coarse, fine) == (5, 66)
    assert abs(at(2048, coarse) - 321.502929688) < 1e-6
    assert abs(at(232, fine) - 480.400390625) < 1e-6


@pytest.mark.contract("VR-4")
def test_partial_results_at_the_production_budget():
    width = DRAFT + C128
    got = [peak_chunks(8192, width, max_chunks=72, capacity=c) for c in (None, 144, 384, 512, 768)]
    assert got == [40_960, 40_960, 40_960, 40_960, 55_296]


@pytest.mark.contract("VR-4")
def test_the_planner_is_asked_once_per_row_count(monkeypatch):
    calls = []
    plan = module.split_plan

    def counted(rows, width, **options):
        calls.append(rows)
        return plan(rows, width, **options)

    monkeypatch.setattr(module, "split_plan", counted)
    peak_chunks.cache_clear()
    first = peak_chunks(2048, DRAFT + C128, max_chunks=72, capacity=384)
    assert peak_chunks(2048, DRAFT + C128, max_chunks=72, capacity=384) == first
    assert calls == list(range(1, 2049))


@pytest.mark.contract("VR-5")
def test_decode_rows_fail_closed():
    check_decode_rows("decode", 384, 384)
    with pytest.raises(ValueError, match="decode rows 385 exceed the declared capacity 384"):
        check_decode_rows("decode", 385, 384)
    check_decode_rows("extend", 8192, 384)
    check_decode_rows("decode", 100_000, None)
    with pytest.raises(ValueError, match="decode rows 150 exceed the declared capacity 144"):
        check_decode_rows("decode", 150, 144)  # although such a step could be planned
    assert split_plan(150, 384, capacity=144) == split_plan(150, 384)
    with pytest.raises(ValueError, match="mode must be 'decode' or 'extend', got 'verify'"):
        check_decode_rows("verify", 1, 384)


@given(
    rows=st.integers(-2, 3000),
    width=st.integers(-2, 300_000),
    limit=st.none() | st.integers(0, 400),
    capacity=st.none() | st.integers(1, 2000),
)
def test_a_plan_covers_every_key_within_its_limit(rows, width, limit, capacity):
    plan = split_plan(rows, width, max_chunks=limit, capacity=capacity)
    assert plan.chunk_size * plan.num_chunks >= width
    assert 1 <= plan.num_chunks <= min(limit or 256, 256)
    assert (plan.num_chunks - 1) * plan.chunk_size < max(width, 1) or plan.num_chunks == min(limit or 256, 256)
    if rows <= 256:
        assert plan == split_plan(rows, width, max_chunks=limit)
