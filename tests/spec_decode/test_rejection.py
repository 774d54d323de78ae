"""Losslessness: by exact enumeration and by sampling, with planted bugs that the tests must catch."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from dspark_jax import sampling as sampling_module
from dspark_jax.sampling import RowSampling
from dspark_jax.sampling_params import SamplingParams
from dspark_jax.spec_decode import rejection
from dspark_jax.spec_decode.rejection import acceptance, residual, sample_draft, verify

VERIFY = jax.jit(verify, static_argnames="draft_sampling")


# -- exact enumeration (T13, T16) --------------------------------------------------------------------------------------
def output_law(p, q, stop, steps, vocab):
    """Law of the first ``steps`` output tokens when drafts are verified with our rules.

    ``p[prefix]`` and ``q[prefix]`` are next-token laws; ``stop(prefix)`` says whether the block ends before the draft
    after ``prefix`` (``stop(prefix, token)`` may look at the token: an anticipating rule). After a block decoding
    goes on plainly, by p.
    """
    law = {}

    def emit(prefix, weight):
        if len(prefix) >= steps:
            law[prefix[:steps]] = law.get(prefix[:steps], 0.0) + weight
            return
        for token in range(vocab):
            emit((*prefix, token), weight * p[prefix][token])

    def block(prefix, weight):
        if weight == 0:
            return
        if len(prefix) == steps:
            emit(prefix, weight)
            return
        accept, left = np.asarray(acceptance(p[prefix], q[prefix])), np.asarray(residual(p[prefix], q[prefix]))
        for token in range(vocab):
            drafted = weight * q[prefix][token]
            if stop(prefix, token):
                for plain in range(vocab):  # not considered, so not rejected: the target's own law
                    emit((*prefix, plain), drafted * p[prefix][plain])
                continue
            block((*prefix, token), drafted * accept[token])
            for other in range(vocab):
                emit((*prefix, other), drafted * (1 - accept[token]) * left[other])

    block((), 1.0)
    return law


def laws(rng, vocab, steps, sharpness=1.0):
    prefixes = [x for n in range(steps) for x in itertools.product(range(vocab), repeat=n)]
    return {x: rng.dirichlet(np.full(vocab, sharpness)) for x in prefixes}


def error(law, p, steps, vocab):
    worst = 0.0
    for sequence in itertools.product(range(vocab), repeat=steps):
        want = np.prod([p[sequence[:i]][sequence[i]] for i in range(steps)])
        worst = max(worst, abs(law.get(sequence, 0.0) - want))
    return worst


@pytest.mark.contract("T13", "T16")
@pytest.mark.parametrize("vocab", [2, 3])
def test_exact_law_under_non_anticipating_stops(rng, vocab):
    steps = 4
    with jax.enable_x64(True):
        for _ in range(3):
            p, q = laws(rng, vocab, steps), laws(rng, vocab, steps)
            stops = {x: rng.random() < 0.3 for x in p}
            for stop in (lambda x, t: False, lambda x, t, stops=stops: stops[x], lambda x, t: len(x) >= 2):
                assert error(output_law(p, q, stop, steps, vocab), p, steps, vocab) < 1e-12


@pytest.mark.contract("T13")
def test_a_stop_that_looks_at_the_token_is_caught(rng):
    with jax.enable_x64(True):
        p, q = laws(rng, 2, 3), laws(rng, 2, 3)
        assert error(output_law(p, q, lambda x, t: t == 1, 3, 2), p, 3, 2) > 1e-3


@pytest.mark.contract("T13")
def test_the_papers_counterexample():
    """Looking ahead at confidences gives (.85, .15) where the target is (.7, .3); deciding before the draw does not."""
    p, q = {(): np.array([0.7, 0.3])}, {(): np.array([0.5, 0.5])}
    with jax.enable_x64(True):
        broken = output_law(p, q, lambda x, t: t == 1, 1, 2)
        right = output_law(p, q, lambda x, t: False, 1, 2)
    np.testing.assert_allclose([broken[0,], broken[1,]], [0.85, 0.15], atol=1e-12)
    np.testing.assert_allclose([right[0,], right[1,]], [0.7, 0.3], atol=1e-12)


def test_residual_of_equal_laws_is_the_law(rng):
    p = jnp.asarray(rng.dirichlet(np.ones(5)), jnp.float32)
    np.testing.assert_allclose(residual(p, p), p, atol=1e-7)
    one_hot = jnp.asarray([0.0, 1.0, 0.0])
    np.testing.assert_allclose(residual(one_hot, one_hot), one_hot)
    assert acceptance(jnp.float32(0.2), jnp.float32(0.0)) == 1


# -- the real function, by sampling (T14, T15) -------------------------------------------------------------------------
VOCAB, K, DRAWS = 8, 2, 50_000


@functools.partial(jax.jit, static_argnums=(4, 5, 6))
def two_tokens(p_table, q_table, sampling, num_drafts, draft_sampling, scored_as, draft_stream):
    """The first two output tokens of each request, after a start that is row 0 of the tables."""
    n = num_drafts.shape[0]
    start, position = jnp.zeros(n, jnp.int32), jnp.zeros(n, jnp.int32)

    def draft(logits, positions):
        if draft_stream is not None:
            scaled = sampling_module.scale(logits, sampling)
            return sampling_module.draw(scaled, sampling, positions, draft_stream)
        return sample_draft(logits, sampling, positions, draft_sampling=draft_sampling)

    first = draft(q_table[start], position + 1)
    second = draft(q_table[1 + first], position + 2)
    q = jnp.stack([q_table[start], q_table[1 + first]], 1)
    p = jnp.stack([p_table[start], p_table[1 + first], p_table[1 + second]], 1)
    drafts = jnp.stack([first, second], 1)
    verdict = verify(p, drafts, q, num_drafts, sampling, position, draft_sampling=scored_as)
    token = verdict.tokens[:, 0]
    # Where one step gave one token only, the next step gives the second.
    plain = sampling_module.sample(p_table[1 + token], sampling, position + 2, sampling_module.RESIDUAL)
    return token, jnp.where(verdict.num_tokens > 1, verdict.tokens[:, 1], plain)


class Model:
    """Target and drafter with random laws that depend on the token before."""

    def __init__(self, seed):
        rng = np.random.default_rng(seed)
        self.p = jnp.asarray(rng.normal(0, 1.5, (1 + VOCAB, VOCAB)), jnp.float32)
        self.q = jnp.asarray(rng.normal(0, 1.5, (1 + VOCAB, VOCAB)), jnp.float32)

    def pairs(self, params, *, draft_sampling="probabilistic", num_drafts=K, scored_as=None, draft_stream=None):
        """The first two tokens of ``DRAWS`` requests with different seeds, each verified by one or two steps."""
        n = DRAWS
        sampling = RowSampling.from_params([params] * n, list(range(n)), size=n)
        scored_as = scored_as or draft_sampling
        tokens = two_tokens(self.p, self.q, sampling, jnp.full(n, num_drafts), draft_sampling, scored_as, draft_stream)
        return np.stack([np.asarray(x) for x in tokens], 1)

    def p_value(self, pairs, params):
        sampling = RowSampling.from_params([params] * (1 + VOCAB), [0] * (1 + VOCAB), size=1 + VOCAB)
        law = np.asarray(jax.nn.softmax(sampling_module.target_logits(self.p, sampling), axis=-1), np.float64)
        joint = (law[0][:, None] * law[1:]).reshape(-1)
        counts = np.bincount(pairs[:, 0] * VOCAB + pairs[:, 1], minlength=VOCAB * VOCAB)
        if counts[joint == 0].sum():
            return 0.0
        expected = joint * len(pairs)
        rare = expected < 10
        observed = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
        keep = expected > 0
        return stats.chisquare(observed[keep], expected[keep] * observed[keep].sum() / expected[keep].sum()).pvalue


CASES = {
    "plain": (SamplingParams(), {}),
    "cold": (SamplingParams(temperature=0.5), {}),
    "top-k and top-p": (SamplingParams(top_k=5, top_p=0.9), {}),
    "min-p": (SamplingParams(temperature=1.3, min_p=0.1), {}),
    "greedy drafts": (SamplingParams(), {"draft_sampling": "greedy"}),
    "trimmed to one": (SamplingParams(), {"num_drafts": 1}),
    "trimmed to none": (SamplingParams(), {"num_drafts": 0}),
}


@pytest.mark.contract("T14")
def test_pairs_follow_the_target_law():
    """Pair marginals, 50 000 draws a case, Holm-corrected: false alarms 1e-3 over all cases (seeds are fixed)."""
    values = []
    for seed, (params, options) in enumerate(CASES.values()):
        model = Model(seed)
        values.append(model.p_value(model.pairs(params, **options), params))
    for rank, value in enumerate(sorted(values)):
        assert value > 1e-3 / (len(values) - rank), dict(zip(CASES, values, strict=True))


@pytest.mark.contract("T14")
def test_planted_bug_argmax_drafts_scored_as_sampled_ones():
    model = Model(0)
    pairs = model.pairs(SamplingParams(), draft_sampling="greedy", scored_as="probabilistic")
    assert model.p_value(pairs, SamplingParams()) < 1e-6


@pytest.mark.contract("T15")
def test_planted_bug_drafts_and_residuals_share_a_stream():
    model = Model(1)
    pairs = model.pairs(SamplingParams(), draft_stream=sampling_module.RESIDUAL)
    assert model.p_value(pairs, SamplingParams()) < 1e-6


# -- single verdicts ---------------------------------------------------------------------------------------------------
def one(logits, drafts, params, num_drafts=None, mode="probabilistic"):
    k = len(drafts)
    sampling = RowSampling.from_params([params], [1], size=1)
    return VERIFY(
        jnp.asarray(logits, jnp.float32)[None],
        jnp.asarray(drafts, jnp.int32).reshape(1, k),
        jnp.zeros((1, k, np.shape(logits)[1])),
        jnp.asarray([k if num_drafts is None else num_drafts]),
        sampling,
        jnp.asarray([10]),
        draft_sampling=mode,
    )


@pytest.mark.parametrize(
    ("drafts", "num_drafts", "tokens"),
    [
        ([1, 2, 3], None, [1, 2, 3, 4]),
        ([1, 2, 0], None, [1, 2, 3, -1]),
        ([0, 2, 3], None, [1, -1, -1, -1]),
        ([1, 2, 3], 1, [1, 2, -1, -1]),
        ([1, 2, 3], 0, [1, -1, -1, -1]),
        ([1, -1, 3], None, [1, 2, -1, -1]),
        ([1, 99, 3], None, [1, 2, -1, -1]),
    ],
)
def test_greedy_verdicts(drafts, num_drafts, tokens):
    logits = 5 * np.eye(6)[[1, 2, 3, 4]]
    for params in (SamplingParams(temperature=0), SamplingParams(top_k=1)):  # a point mass, by either way
        mode = "greedy" if params.top_k else "probabilistic"
        verdict = one(logits, drafts, params, num_drafts, mode)
        assert verdict.tokens[0].tolist() == tokens
        assert verdict.num_tokens[0] == sum(t >= 0 for t in tokens) == verdict.num_accepted[0] + 1


def test_no_drafts_at_all():
    assert one(5 * np.eye(6)[[4]], [], SamplingParams(temperature=0)).tokens.tolist() == [[4]]
    assert one(50 * np.eye(6)[[4]], [], SamplingParams()).tokens.tolist() == [[4]]


def test_mixed_rows_keep_to_their_own_rules(rng):
    """Greedy rows in a batch with sampled ones give what they give alone."""
    logits = jnp.asarray(rng.normal(0, 1, (4, 3, 9)), jnp.float32)
    drafts = jnp.argmax(logits[:, :2], -1).astype(jnp.int32).at[1, 1].add(1)
    params = [SamplingParams(temperature=0), SamplingParams(temperature=0), SamplingParams(), SamplingParams(top_k=3)]
    arguments = (drafts, jnp.zeros((4, 2, 9)), jnp.full(4, 2))
    mixed = VERIFY(
        logits, *arguments, RowSampling.from_params(params, [1] * 4, size=4), jnp.arange(4), draft_sampling="greedy"
    )
    greedy = VERIFY(
        logits,
        *arguments,
        RowSampling.from_params(params[:1] * 4, [1] * 4, size=4),
        jnp.arange(4),
        draft_sampling="greedy",
    )
    np.testing.assert_array_equal(mixed.tokens[:2], greedy.tokens[:2])


def test_extreme_logits_give_tokens():
    logits = np.full((3, 6), -np.inf)
    logits[:, 2] = 1e30
    for mode in ("greedy", "probabilistic"):
        assert one(logits, [2, 5], SamplingParams(), mode=mode).tokens[0].tolist()[0] == 2
    assert rejection.MIN_RESIDUAL_MASS > 0
