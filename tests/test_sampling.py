"""The law that tokens are drawn from, and draws that depend on the request alone."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from dspark_jax.sampling import ACCEPT, DRAFT, RESIDUAL, RowSampling, draw, sample, target_logits
from dspark_jax.sampling_params import SamplingParams, SamplingParamsError

TARGET = jax.jit(target_logits)
DRAW = jax.jit(draw, static_argnums=3)
VOCAB = 24


def rows(params, seeds=None, size=None):
    return RowSampling.from_params(params, seeds or list(range(len(params))), size=size or len(params))


def kept_by_hand(logits, p):
    """Ids that stay, one filter after the other, in float64."""
    scaled = logits.astype(np.float64) / p.temperature
    order = sorted(range(len(logits)), key=lambda i: (-scaled[i], i))
    if p.top_k > 0:
        order = order[: p.top_k]
    law = np.exp(scaled[order] - scaled[order[0]])
    law /= law.sum()
    count = len(order)
    if p.top_p < 1:
        count = min(count, int((np.cumsum(law) - law < p.top_p).sum()))
    if p.min_p > 0:
        count = min(count, int((law >= p.min_p * law[0]).sum()))
    return set(order[: max(count, 1)])


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 2**32 - 1),
    st.lists(
        st.builds(
            SamplingParams,
            temperature=st.sampled_from([0.3, 1.0, 2.5]),
            top_k=st.sampled_from([0, 1, 3, 20, 1000]),
            top_p=st.sampled_from([0.1, 0.5, 0.95, 1.0]),
            min_p=st.sampled_from([0.0, 0.05, 0.9]),
        ),
        min_size=4,
        max_size=4,
    ),
)
def test_filters(seed, params):
    logits = np.random.default_rng(seed).normal(0, 2, (4, VOCAB)).astype(np.float32)
    logits[:, 3] = logits[:, 5]  # a tie: the lower id comes first
    got = np.asarray(TARGET(logits, rows(params)))
    for row, p in enumerate(params):
        kept = set(np.flatnonzero(np.isfinite(got[row])).tolist())
        want = kept_by_hand(logits[row], p)
        # Float32 may place a cumulative sum on the other side of a bound: at most one token differs then.
        assert len(kept ^ want) <= 1
        ids = sorted(kept)
        np.testing.assert_allclose(got[row, ids], logits[row, ids] / p.temperature, rtol=1e-6)


def test_greedy_rows_ignore_every_filter(rng):
    logits = rng.normal(0, 1, (3, VOCAB)).astype(np.float32)
    params = [SamplingParams(temperature=0, top_k=2, top_p=0.1), SamplingParams(), SamplingParams(temperature=1e-6)]
    sampling = rows(params)
    tokens = np.asarray(jax.jit(sample, static_argnums=3)(logits, sampling, np.arange(3), RESIDUAL))
    assert tokens[0] == logits[0].argmax()
    assert tokens[2] == logits[2].argmax()
    np.testing.assert_array_equal(TARGET(logits, sampling)[0], logits[0])


@pytest.mark.contract("T10")
def test_draws_do_not_depend_on_the_batch(rng):
    logits = rng.normal(0, 1, (7, VOCAB)).astype(np.float32)
    positions = np.arange(100, 107, dtype=np.int32)
    params, seeds = [SamplingParams()] * 7, [5, 6, 7, 8, 9, 10, 2**63 + 1]
    together = np.asarray(DRAW(logits, rows(params, seeds), positions, DRAFT))
    for i in range(7):
        alone = DRAW(logits[i : i + 1], rows(params[:1], [seeds[i]]), positions[i : i + 1], DRAFT)
        padded_logits = np.concatenate([logits[i : i + 1], np.zeros((3, VOCAB), np.float32)])
        padded = DRAW(padded_logits, rows(params[:1], [seeds[i]], size=4), np.full(4, positions[i]), DRAFT)
        assert together[i] == alone[0] == padded[0]


def test_seed_position_and_stream_each_change_the_draw():
    n = 64
    logits, params = np.zeros((n, 1000), np.float32), [SamplingParams()] * n
    base = np.asarray(DRAW(logits, rows(params, [1] * n), np.arange(n), DRAFT))
    assert len(set(base.tolist())) > n * 0.8
    assert (base == np.asarray(DRAW(logits, rows(params, [2] * n), np.arange(n), DRAFT))).mean() < 0.1
    for stream in (ACCEPT, RESIDUAL):
        assert (base == np.asarray(DRAW(logits, rows(params, [1] * n), np.arange(n), stream))).mean() < 0.1
    np.testing.assert_array_equal(base, DRAW(logits, rows(params, [1] * n), np.arange(n), DRAFT))


def test_draws_follow_the_law(rng):
    """Chi-square over 20 000 draws; false alarms: 1e-5."""
    n = 20_000
    params = SamplingParams(temperature=0.8, top_k=9, top_p=0.95)
    logits = np.broadcast_to(rng.normal(0, 1.5, VOCAB).astype(np.float32), (n, VOCAB))
    sampling = rows([params] * n, [3] * n)
    law = np.asarray(jax.nn.softmax(TARGET(logits[:1], rows([params]))[0]), np.float64)
    tokens = np.asarray(DRAW(TARGET(logits, sampling), sampling, np.arange(n), RESIDUAL))
    counts = np.bincount(tokens, minlength=VOCAB)
    assert counts[law == 0].sum() == 0
    live = law > 0
    assert stats.chisquare(counts[live], n * law[live] / law[live].sum()).pvalue > 1e-5


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", float("nan")),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", 2),
        ("max_tokens", 0),
        ("max_tokens", -5),
        ("seed", 2**63),
        ("stop", "text"),
        ("stop", ("",)),
        ("stop_token_ids", (-1,)),
    ],
)
def test_parameters_out_of_range_are_named(field, value):
    with pytest.raises(SamplingParamsError, match=field) as error:
        SamplingParams(**{field: value})
    assert error.value.parameter == field


def test_padding_and_size():
    sampling = RowSampling.from_params([SamplingParams()], [1], size=3)
    assert sampling.temperature.tolist() == [1, 0, 0]
    with pytest.raises(ValueError, match="at most 0"):
        RowSampling.from_params([SamplingParams()], [1], size=0)
    assert jnp.asarray(sampling.repeat(2).top_p).shape == (6,)
