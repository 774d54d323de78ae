"""The compiled programs: pure functions ``(params, state, batch) -> (state, outputs)``, one per bucket.

What the device needs again in the next step (anchor, position, drafts and their law, caches) lives in ``DeviceState``,
indexed by request slot and donated to each step. The host sends what it decides (slots, tables, sampling) and reads
tokens back one step late.
"""

from __future__ import annotations

import dataclasses
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Int

from dspark_jax.cache.groups import CacheLayouts, Caches
from dspark_jax.config import ModelConfig
from dspark_jax.models.deepseek_v4 import DeepseekV4, Forward
from dspark_jax.models.dspark import commit_context, draft_block, markov_step
from dspark_jax.models.mtp import mtp_logits
from dspark_jax.models.rows import Rows, window_writes
from dspark_jax.sampling import RESIDUAL, RowSampling, sample
from dspark_jax.spec_decode.depth import limit_drafts
from dspark_jax.spec_decode.rejection import sample_draft, verify


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DeviceState:
    """Everything that outlives a step, for S request slots.

    ``anchor[s]`` is the last token of slot s, not yet processed, at ``position[s]``; the first ``num_drafts[s]`` of
    ``drafts[s]`` are proposals for the positions after it (what lies behind them is of an earlier, deeper step and
    never verified), ``draft_logits[s]`` the law they were drawn from (float32, *before* temperature) and
    ``confidence[s]`` the logits of their acceptance (0 for MTP, which has no such head).
    """

    anchor: Int[Array, " S"]
    position: Int[Array, " S"]
    num_drafts: Int[Array, " S"]
    drafts: Int[Array, "S K"]
    draft_logits: Float[Array, "S K V"]
    confidence: Float[Array, "S K"]
    trunk: Caches
    draft: Caches


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DecodeBatch:
    """R requests that verify their drafts. ``slot`` -1 is padding; ``num_drafts`` limits how many drafts are
    verified; ``first_valid``: see ``Rows``."""

    slot: Int[Array, " R"]
    num_drafts: Int[Array, " R"]
    first_valid: Int[Array, " R"]
    window_table: Int[Array, "R Pw"]
    block_table: Int[Array, "R Pb"]
    sampling: RowSampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class PrefillBatch:
    """A chunk of prompt tokens of up to B requests.

    ``finishes``: the chunk ends the prompt, so the request gets its first token and drafts. ``anchor`` forces that
    token (a resumed request already has it), -1 samples it. ``next_token`` is the prompt token after each row (-1
    where it is not known yet).
    """

    rows: Rows
    next_token: Int[Array, " N"]
    finishes: Bool[Array, " B"]
    anchor: Int[Array, " B"]
    sampling: RowSampling


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class StepOutput:
    """Tokens committed for each request of the batch (-1 behind the first ``num_tokens``), and how many drafts were
    verified and accepted."""

    tokens: Int[Array, "R T"]
    num_tokens: Int[Array, " R"]
    num_verified: Int[Array, " R"]
    num_accepted: Int[Array, " R"]


@dataclasses.dataclass(frozen=True)
class StepProgram:
    """What is static in a step: the module's graph, the cache layouts, K and how drafts are drawn."""

    graph: nnx.GraphDef[DeepseekV4]
    config: ModelConfig
    layouts: CacheLayouts
    num_drafts: int
    draft_sampling: Literal["probabilistic", "greedy"]
    max_model_len: int

    def init_state(self) -> DeviceState:
        """Zeroed state. Nothing in it is read before it is written: visibility follows from positions."""
        config = self.config
        s, k = self.layouts.max_num_seqs, self.num_drafts
        return DeviceState(
            anchor=jnp.zeros((s,), jnp.int32),
            position=jnp.zeros((s,), jnp.int32),
            num_drafts=jnp.zeros((s,), jnp.int32),
            drafts=jnp.zeros((s, k), jnp.int32),
            draft_logits=jnp.zeros((s, k, config.vocab_size), jnp.float32),
            confidence=jnp.zeros((s, k), jnp.float32),
            trunk=self.layouts.trunk_caches(config),
            draft=self.layouts.draft_caches() if k else Caches([]),
        )

    def decode(
        self, params: nnx.State, state: DeviceState, batch: DecodeBatch, *, depth: int
    ) -> tuple[DeviceState, StepOutput]:
        """Verify, accept or reject, commit, draft again: one step for R requests (DSpark specification, sections 3 and
        4). At most ``depth`` drafts are verified, and as many drafted; 0 decodes one token and drafts nothing."""
        model = nnx.merge(self.graph, params)
        live, width = batch.slot >= 0, 1 + depth
        slot = jnp.where(live, batch.slot, 0)
        position, drafts = state.position[slot], limit_drafts(state.drafts[slot], depth)
        room = self.max_model_len - position
        offered = jnp.minimum(batch.num_drafts, state.num_drafts[slot])
        num_rows = jnp.where(live, jnp.clip(1 + offered, 1, jnp.clip(room, 1, width)), 0)
        rows = _uniform_rows(jnp.concatenate([state.anchor[slot][:, None], drafts], axis=1), position, num_rows, batch)
        forward, trunk = model(rows, state.trunk, self.layouts)
        logits = model.logits(forward.streams).reshape(slot.shape[0], width, -1)
        with jax.named_scope("rejection"):
            result = verify(
                logits,
                drafts,
                limit_drafts(state.draft_logits[slot], depth),
                jnp.maximum(num_rows - 1, 0),
                batch.sampling,
                position,
                draft_sampling=self.draft_sampling,
            )
        last = jnp.maximum(result.num_tokens - 1, 0)
        anchor = jnp.take_along_axis(result.tokens, last[:, None], axis=1)[:, 0]
        state = dataclasses.replace(state, trunk=trunk)
        # Rows 0..num_accepted hold committed tokens: the anchor and the accepted drafts. Only they feed the drafter.
        committed = jnp.arange(width) <= result.num_accepted[:, None]
        rows = dataclasses.replace(rows, valid=rows.valid & committed.reshape(-1))
        last_row = jnp.arange(slot.shape[0], dtype=jnp.int32) * width + last
        state = self._propose(
            model,
            state,
            forward,
            rows,
            result.tokens.reshape(-1),
            last_row,
            anchor,
            position + result.num_tokens,
            live,
            batch.sampling,
            depth,
        )
        return state, StepOutput(
            jnp.where(live[:, None], result.tokens, -1),
            jnp.where(live, result.num_tokens, 0),
            jnp.maximum(num_rows - 1, 0),
            jnp.where(live, result.num_accepted, 0),
        )

    def prefill(self, params: nnx.State, state: DeviceState, batch: PrefillBatch) -> tuple[DeviceState, StepOutput]:
        """Processes a chunk of prompt tokens; requests whose prompt ends here get their first token and drafts."""
        model = nnx.merge(self.graph, params)
        rows = batch.rows
        forward, trunk = model(rows, state.trunk, self.layouts)
        last_row = jnp.maximum(rows.first_row + rows.num_rows - 1, 0)
        position = rows.start + rows.num_rows
        logits = model.logits(forward.streams[last_row])
        sampled = sample(logits, batch.sampling, position, RESIDUAL)
        anchor = jnp.where(batch.anchor >= 0, batch.anchor, sampled)
        state = dataclasses.replace(state, trunk=trunk)
        next_token = jnp.where(batch.next_token >= 0, batch.next_token, anchor[rows.request])
        state = self._propose(
            model,
            state,
            forward,
            rows,
            next_token,
            last_row,
            anchor,
            position,
            batch.finishes,
            batch.sampling,
            self.num_drafts,
        )
        none = jnp.zeros_like(batch.anchor)
        tokens = jnp.where(batch.finishes, anchor, -1)[:, None]
        return state, StepOutput(tokens, batch.finishes.astype(jnp.int32), none, none)

    def _propose(
        self,
        model: DeepseekV4,
        state: DeviceState,
        forward: Forward,
        rows: Rows,
        next_token: Int[Array, " N"],
        last_row: Int[Array, " R"],
        anchor: Int[Array, " R"],
        position: Int[Array, " R"],
        live: Bool[Array, " R"],
        sampling: RowSampling,
        depth: int,
    ) -> DeviceState:
        """Feeds committed rows to the drafter and drafts ``depth`` tokens for the live requests, then stores both by
        slot.

        ``rows.valid`` marks committed rows; ``anchor`` at ``position`` is each request's newest token.
        """
        # A negative index would wrap to the last slot, so padding goes to an index past the end, which mode="drop"
        # ignores.
        slot = jnp.where(live & (rows.slot >= 0), rows.slot, state.anchor.shape[0])
        state = dataclasses.replace(
            state,
            anchor=state.anchor.at[slot].set(anchor, mode="drop"),
            position=state.position.at[slot].set(position, mode="drop"),
            num_drafts=state.num_drafts.at[slot].set(depth, mode="drop"),
        )
        if not self.num_drafts:
            return state
        with jax.named_scope("draft"):
            if self.config.draft_kind == "mtp":
                logits, draft = mtp_logits(
                    model, state.draft, self.layouts, forward.streams, next_token, rows, last_row
                )
                if not depth:
                    return dataclasses.replace(state, draft=draft)
                tokens = sample_draft(logits, sampling, position + 1, draft_sampling=self.draft_sampling)[:, None]
                logits, confidence = logits[:, None], jnp.zeros(tokens.shape, jnp.float32)
            else:
                assert forward.taps is not None
                draft = commit_context(
                    model, state.draft, self.layouts, forward.taps, rows.position, window_writes(rows)
                )
                if not depth:
                    return dataclasses.replace(state, draft=draft)
                block = draft_block(
                    model,
                    draft,
                    self.layouts,
                    anchor,
                    position,
                    rows.window_table,
                    live,
                    rows.first_valid,
                    self.num_drafts,
                )

                def step(previous: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
                    hidden, base, offset = inputs
                    logits, confidence = markov_step(model, hidden, base, previous)
                    token = sample_draft(logits, sampling, position + offset, draft_sampling=self.draft_sampling)
                    return token, (token, logits, confidence)

                first = (block.hidden[:, :depth].swapaxes(0, 1), block.base_logits[:, :depth].swapaxes(0, 1))
                _, stacked = jax.lax.scan(step, anchor, (*first, jnp.arange(1, depth + 1, dtype=jnp.int32)))
                tokens, logits, confidence = (x.swapaxes(0, 1) for x in stacked)
        return dataclasses.replace(
            state,
            draft=draft,
            drafts=state.drafts.at[slot, :depth].set(tokens, mode="drop"),
            draft_logits=state.draft_logits.at[slot, :depth].set(logits, mode="drop"),
            confidence=state.confidence.at[slot, :depth].set(confidence, mode="drop"),
        )


def _uniform_rows(
    tokens: Int[Array, "R T"], position: Int[Array, " R"], num_rows: Int[Array, " R"], batch: DecodeBatch
) -> Rows:
    """Rows of a verify step: T rows a request, of which the first ``num_rows`` are live."""
    requests, width = tokens.shape
    offset = jnp.arange(width, dtype=jnp.int32)
    index = jnp.arange(requests, dtype=jnp.int32)
    return Rows(
        token=tokens.reshape(-1),
        position=(position[:, None] + offset).reshape(-1),
        request=jnp.repeat(index, width),
        valid=(offset < num_rows[:, None]).reshape(-1),
        slot=batch.slot,
        start=position,
        first_row=index * width,
        num_rows=num_rows,
        window_table=batch.window_table,
        block_table=batch.block_table,
        write_from=jnp.zeros_like(position),
        first_valid=batch.first_valid,
    )
