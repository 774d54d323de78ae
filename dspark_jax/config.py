"""Configuration of the model, the drafter and the engine: frozen dataclasses that check themselves.

Every error names the field or knob, what was expected and what was found. ``ModelConfig.from_hf`` reads the
``config.json`` of a DeepSeek-V4 checkpoint (Flash, Pro, with the preview MTP block or the DSpark drafter).
"""

from __future__ import annotations

import dataclasses
import json
import math
import pathlib
from collections.abc import Mapping
from typing import Any, Literal, get_args

Precision = Literal["exact", "checkpoint"]
PageStyle = Literal["contiguous", "padded", "packed_blocks"]
DraftKind = Literal["none", "mtp", "dspark"]

SUPPORTED_MODEL_TYPE = "deepseek_v4"
SUPPORTED_ARCHITECTURE = "DeepseekV4ForCausalLM"
COMPRESSION_RATIOS = (0, 4, 128)


# Far above what any drafter is trained for (5 and 7): a bound on shapes, not advice.
MAX_SPECULATIVE_TOKENS = 32


class ConfigError(ValueError):
    """A configuration field has a value that this engine cannot serve."""


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise ConfigError(message)


def resolve_depth(depth: int | None, default: int) -> int:
    """``depth``, or ``default`` where none was given. 0 is a depth: nothing is drafted."""
    return default if depth is None else depth


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """YaRN parameters. They apply only to layers with a compressor (ratio 4 or 128)."""

    factor: float = 16.0
    original_max_position_embeddings: int = 65536
    beta_fast: float = 32.0
    beta_slow: float = 1.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            _require(number, f"rope_scaling.{field.name} must be a number, got {value!r}")
        _require(self.beta_fast > 0, f"rope_scaling.beta_fast must be positive, got {self.beta_fast}")
        _require(self.beta_slow > 0, f"rope_scaling.beta_slow must be positive, got {self.beta_slow}")
        _require(self.factor >= 1, f"rope_scaling.factor must be at least 1, got {self.factor}")
        _require(
            self.original_max_position_embeddings > 0,
            f"rope_scaling.original_max_position_embeddings must be positive, "
            f"got {self.original_max_position_embeddings}",
        )


@dataclasses.dataclass(frozen=True)
class ModelConfig:
    """Shapes and constants of a DeepSeek-V4 model, named as in its ``config.json``.

    ``compress_ratios`` holds the trunk only (``num_hidden_layers`` entries: 0 sliding window, 4 CSA, 128 HCA);
    ``num_draft_stages`` is the length of the list's tail, that is the number of ``mtp.k`` blocks. It is *not*
    ``num_nextn_predict_layers``, which stays 1 in checkpoints with three DSpark stages.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    head_dim: int
    qk_rope_head_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    sliding_window: int
    compress_ratios: tuple[int, ...]
    index_n_heads: int
    index_head_dim: int
    index_topk: int
    n_routed_experts: int
    num_experts_per_tok: int
    moe_intermediate_size: int
    num_hash_layers: int
    routed_scaling_factor: float
    swiglu_limit: float
    max_position_embeddings: int
    rope_theta: float = 10000.0
    compress_rope_theta: float = 160000.0
    rope_scaling: RopeScaling = RopeScaling()
    hc_mult: int = 4
    hc_sinkhorn_iters: int = 20
    hc_eps: float = 1e-6
    rms_norm_eps: float = 1e-6
    bos_token_id: int = 0
    eos_token_id: int = 1
    expert_dtype: Literal["fp4", "fp8", "bf16", "fp32"] = "fp4"
    linear_dtype: Literal["fp8", "bf16", "fp32"] = "fp8"
    num_draft_stages: int = 0
    draft_kind: DraftKind = "none"
    dspark_block_size: int = 0
    dspark_noise_token_id: int = 0
    dspark_target_layer_ids: tuple[int, ...] = ()
    dspark_markov_rank: int = 0

    def __post_init__(self) -> None:
        for name in (
            "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank "
            "o_groups o_lora_rank sliding_window index_n_heads index_head_dim index_topk n_routed_experts "
            "num_experts_per_tok moe_intermediate_size max_position_embeddings hc_mult hc_sinkhorn_iters"
        ).split():
            value = getattr(self, name)
            _require(isinstance(value, int) and value > 0, f"{name} must be a positive integer, got {value!r}")
        _require(
            len(self.compress_ratios) == self.num_hidden_layers,
            f"compress_ratios must give one ratio per layer: expected {self.num_hidden_layers}, "
            f"got {len(self.compress_ratios)}",
        )
        bad = sorted(set(self.compress_ratios) - set(COMPRESSION_RATIOS))
        _require(not bad, f"compress_ratios may hold only {COMPRESSION_RATIOS}, got {bad}")
        _require(
            self.qk_rope_head_dim % 2 == 0 and self.qk_rope_head_dim < self.head_dim,
            f"qk_rope_head_dim must be even and smaller than head_dim {self.head_dim}, got {self.qk_rope_head_dim}",
        )
        _require(
            self.num_attention_heads % self.o_groups == 0,
            f"num_attention_heads must be a multiple of o_groups {self.o_groups}, got {self.num_attention_heads}",
        )
        _require(
            self.num_experts_per_tok <= self.n_routed_experts,
            f"num_experts_per_tok must be at most n_routed_experts {self.n_routed_experts}, "
            f"got {self.num_experts_per_tok}",
        )
        _require(
            0 <= self.num_hash_layers <= self.num_hidden_layers,
            f"num_hash_layers must be between 0 and num_hidden_layers {self.num_hidden_layers}, "
            f"got {self.num_hash_layers}",
        )
        if 4 in self.compress_ratios:
            _require(
                self.index_head_dim & (self.index_head_dim - 1) == 0 and self.index_head_dim >= self.qk_rope_head_dim,
                f"index_head_dim must be a power of two and at least qk_rope_head_dim, got {self.index_head_dim}",
            )
        for name in ("bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            _require(
                type(value) is int and 0 <= value < self.vocab_size,
                f"{name} must be below vocab_size {self.vocab_size}, got {value!r}",
            )
        match self.draft_kind:
            case "none":
                _require(
                    self.num_draft_stages == 0,
                    f"num_draft_stages must be 0 without a drafter, got {self.num_draft_stages}",
                )
            case "mtp":
                _require(
                    self.num_draft_stages == 1,
                    f"an MTP checkpoint has exactly one draft stage, got {self.num_draft_stages}",
                )
            case "dspark":
                self._check_dspark()
            case other:
                raise ConfigError(f"draft_kind must be none, mtp or dspark, got {other!r}")

    def _check_dspark(self) -> None:
        _require(self.num_draft_stages >= 1, f"a DSpark drafter needs at least one stage, got {self.num_draft_stages}")
        _require(self.dspark_block_size >= 1, f"dspark_block_size must be at least 1, got {self.dspark_block_size}")
        _require(self.dspark_markov_rank >= 1, f"dspark_markov_rank must be at least 1, got {self.dspark_markov_rank}")
        _require(
            0 <= self.dspark_noise_token_id < self.vocab_size,
            f"dspark_noise_token_id must be below vocab_size {self.vocab_size}, got {self.dspark_noise_token_id}",
        )
        ids = self.dspark_target_layer_ids
        _require(
            len(ids) > 0 and list(ids) == sorted(set(ids)) and ids[0] >= 0 and ids[-1] < self.num_hidden_layers,
            f"dspark_target_layer_ids must be ascending layer indices below {self.num_hidden_layers}, got {list(ids)}",
        )

    # -- derived ------------------------------------------------------------------------------------------------
    @property
    def nope_head_dim(self) -> int:
        """Channels of a head that carry no rotary position (the first ones)."""
        return self.head_dim - self.qk_rope_head_dim

    @property
    def shared_intermediate_size(self) -> int:
        return self.moe_intermediate_size

    def is_hash_layer(self, layer: int) -> bool:
        """Whether layer ``layer`` routes by token id. Draft stages count on from ``num_hidden_layers``."""
        return layer < self.num_hash_layers

    # -- reading ------------------------------------------------------------------------------------------------
    @classmethod
    def from_dir(cls, path: str | pathlib.Path) -> ModelConfig:
        """Reads ``path/config.json``. Raises ``ConfigError`` naming the file when it is missing or is not JSON."""
        file = pathlib.Path(path) / "config.json"
        try:
            text = file.read_text(encoding="utf-8")
        except FileNotFoundError:
            raise ConfigError(f"no config.json in checkpoint directory {str(path)!r}") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot read {str(file)!r}: {error}") from None
        try:
            raw = json.loads(text)
        except json.JSONDecodeError as error:
            raise ConfigError(f"{str(file)!r} is not valid JSON: {error}") from None
        return cls.from_hf(raw)

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any]) -> ModelConfig:
        """Reads the fields of a ``config.json``. Other architectures are refused by name.

        Source: specification of the model, section 1.1 (fields) and 1.1's note on ``compress_ratios``.
        """
        _require(isinstance(raw, Mapping), f"config.json must hold an object, got {type(raw).__name__}")
        model_type = raw.get("model_type")
        _require(
            model_type == SUPPORTED_MODEL_TYPE,
            f"model_type {model_type!r} is not supported: this engine serves {SUPPORTED_MODEL_TYPE!r} only"
            + (" (V4.1 is a different architecture)" if model_type == "deepseek_v41" else ""),
        )
        architectures = raw.get("architectures") or [SUPPORTED_ARCHITECTURE]
        _require(
            isinstance(architectures, (list, tuple)) and SUPPORTED_ARCHITECTURE in architectures,
            f"architectures {architectures!r} is not supported: expected {SUPPORTED_ARCHITECTURE!r}",
        )
        for name, expected in (
            ("num_key_value_heads", 1),
            ("n_shared_experts", 1),
            ("scoring_func", "sqrtsoftplus"),
            ("topk_method", "noaux_tc"),
            ("norm_topk_prob", True),
            ("hidden_act", "silu"),
            ("tie_word_embeddings", False),
            ("attention_bias", False),
        ):
            _require(raw.get(name, expected) == expected, f"{name} must be {expected!r}, got {raw.get(name)!r}")

        def field(name: str, kind: type) -> Any:
            _require(name in raw, f"config.json lacks {name}")
            value = raw[name]
            ok = isinstance(value, (int, float)) if kind is float else isinstance(value, kind)
            ok = ok and not isinstance(value, bool) and (kind is not float or math.isfinite(value))
            _require(ok, f"{name} must be {'a number' if kind is float else 'an integer'}, got {value!r}")
            return kind(value)

        ints = {
            name: field(name, int)
            for name in (
                "vocab_size hidden_size num_hidden_layers num_attention_heads head_dim qk_rope_head_dim q_lora_rank "
                "o_groups o_lora_rank sliding_window index_n_heads index_head_dim index_topk n_routed_experts "
                "num_experts_per_tok moe_intermediate_size num_hash_layers max_position_embeddings hc_mult "
                "hc_sinkhorn_iters"
            ).split()
        }
        floats = {
            name: field(name, float)
            for name in (
                "routed_scaling_factor swiglu_limit rope_theta compress_rope_theta hc_eps rms_norm_eps"
            ).split()
        }
        layers = ints["num_hidden_layers"]
        ratios = raw.get("compress_ratios")
        _require(
            isinstance(ratios, (list, tuple)) and all(isinstance(r, int) and not isinstance(r, bool) for r in ratios),
            f"compress_ratios must be a list of integers, got {ratios!r}",
        )
        assert isinstance(ratios, (list, tuple))
        _require(
            len(ratios) >= layers,
            f"compress_ratios must have at least num_hidden_layers = {layers} entries, got {len(ratios)}",
        )
        trunk, tail = tuple(ratios[:layers]), tuple(ratios[layers:])
        _require(
            not any(tail),
            f"compress_ratios: the entries of the draft stages (after {layers}) must be 0, got {list(tail)}",
        )
        scaling = raw.get("rope_scaling") or {}
        _require(
            isinstance(scaling, Mapping) and scaling.get("type", scaling.get("rope_type", "yarn")) == "yarn",
            f"rope_scaling must be of type 'yarn', got {scaling!r}",
        )
        dspark = any(name.startswith("dspark_") for name in raw)
        kind: DraftKind = "dspark" if dspark else "mtp" if tail else "none"
        extra: dict[str, Any] = {}
        if dspark:
            taps = raw.get("dspark_target_layer_ids")
            _require(
                isinstance(taps, (list, tuple)) and all(isinstance(t, int) for t in taps),
                f"dspark_target_layer_ids must be a list of layer indices, got {taps!r}",
            )
            assert isinstance(taps, (list, tuple))
            extra = {
                "dspark_block_size": field("dspark_block_size", int),
                "dspark_noise_token_id": field("dspark_noise_token_id", int),
                "dspark_markov_rank": field("dspark_markov_rank", int),
                "dspark_target_layer_ids": tuple(taps),
            }
        linear = cls._linear_dtype(raw)
        expert = raw.get("expert_dtype", "fp4") if linear == "fp8" else linear
        _require(expert in ("fp4", "fp8", "bf16", "fp32"), f"expert_dtype must be 'fp4' or 'fp8', got {expert!r}")
        return cls(
            **ints,
            **floats,
            **extra,
            compress_ratios=trunk,
            num_draft_stages=len(tail),
            draft_kind=kind,
            rope_scaling=RopeScaling(
                **{f.name: scaling[f.name] for f in dataclasses.fields(RopeScaling) if f.name in scaling}
            ),
            expert_dtype=expert,
            linear_dtype=linear,
            bos_token_id=raw.get("bos_token_id", 0),
            eos_token_id=raw.get("eos_token_id", 1),
        )

    @staticmethod
    def _linear_dtype(raw: Mapping[str, Any]) -> Literal["fp8", "bf16", "fp32"]:
        quant = raw.get("quantization_config")
        if quant is None:
            dtype = raw.get("torch_dtype", raw.get("dtype", "bfloat16"))
            _require(dtype in ("bfloat16", "float32"), f"torch_dtype must be bfloat16 or float32, got {dtype!r}")
            return "fp32" if dtype == "float32" else "bf16"
        _require(isinstance(quant, Mapping), f"quantization_config must be an object, got {quant!r}")
        for name, expected in (
            ("quant_method", "fp8"),
            ("fmt", "e4m3"),
            ("scale_fmt", "ue8m0"),
            ("weight_block_size", [128, 128]),
        ):
            got = quant.get(name, expected)
            _require(got == expected, f"quantization_config.{name} must be {expected!r}, got {got!r}")
        return "fp8"


@dataclasses.dataclass(frozen=True)
class SpeculativeConfig:
    """How many tokens are drafted a round and how.

    ``num_speculative_tokens`` is K: 0 turns speculation off. ``None`` takes what the checkpoint was trained for
    (DSpark: its block size; MTP: 1; no drafter: 0). A DSpark drafter can be asked for more than it was trained for;
    what it adds is seldom accepted. ``draft_sampling`` is ``probabilistic`` (drafts are drawn from
    softmax(logits / temperature), verified by rejection sampling) or ``greedy`` (drafts are the argmax).
    ``depth_schedule`` drafts less when many requests run: pairs (largest number of requests, drafts), ascending in
    the first, with 0 to K drafts; beyond the last pair nothing is drafted. ``None``: always K.
    """

    num_speculative_tokens: int | None = None
    draft_sampling: Literal["probabilistic", "greedy"] = "probabilistic"
    depth_schedule: tuple[tuple[int, int], ...] | None = None

    def __post_init__(self) -> None:
        k = self.num_speculative_tokens
        _require(
            k is None or (_is_int(k) and 0 <= k <= MAX_SPECULATIVE_TOKENS),
            f"num_speculative_tokens must be an integer from 0 to {MAX_SPECULATIVE_TOKENS}, got {k!r}",
        )
        if self.depth_schedule is not None:
            pairs = self.depth_schedule
            _require(
                len(pairs) > 0
                and all(len(pair) == 2 and all(map(_is_int, pair)) for pair in pairs)
                and [n for n, _ in pairs] == sorted({n for n, _ in pairs if n > 0})
                and all(depth >= 0 for _, depth in pairs),
                f"depth_schedule must hold pairs (number of requests, drafts), ascending in the first, got {pairs!r}",
            )
        _require(
            self.draft_sampling in ("probabilistic", "greedy"),
            f"draft_sampling must be 'probabilistic' or 'greedy', got {self.draft_sampling!r}",
        )

    def resolve(self, model: ModelConfig) -> int:
        """K for this model. Raises ``ConfigError`` when the model has no drafter or the drafter cannot give K."""
        trained = {"none": 0, "mtp": 1, "dspark": model.dspark_block_size}[model.draft_kind]
        k = resolve_depth(self.num_speculative_tokens, trained)
        if k and model.draft_kind == "none":
            raise ConfigError(f"num_speculative_tokens must be 0 for a checkpoint without a drafter, got {k}")
        if model.draft_kind == "mtp":
            _require(k <= 1, f"num_speculative_tokens must be at most 1 with an MTP block, got {k}")
        return k


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Sizes and modes of the engine. Every compiled shape follows from these numbers.

    ``max_num_batched_tokens`` is the largest prefill step; ``num_blocks`` the number of 256-token cache blocks
    (``None``: enough for ``max_num_seqs`` requests of ``max_model_len``). ``precision``: ``checkpoint`` quantises
    activations and KV rows as the checkpoint was trained; ``exact`` quantises nothing (parity with float references).
    ``dtype`` is that of activations (``float32`` is for ``exact`` tests). ``async_scheduling`` dispatches a step
    before the results of the one before are read. ``seed`` is the source of the seeds of requests that bring none.

    ``decode_row_capacity``: the most rows that a verification step is planned for (``None``: what the scheduler can
    present, ``min(max_num_batched_tokens, max_num_seqs * (1 + K))``); fewer than that is refused at start.
    ``decode_buckets`` and ``prefill_buckets`` name the request counts and token counts to compile steps for (``None``:
    a ladder; the largest possible is always added). ``page_style``: how far apart cache pages of packed rows lie (see
    ``CacheLayouts``). ``prefix_caching`` keeps the blocks of finished requests for prompts that begin like them;
    ``num_prefix_tails`` is at how many block boundaries such a prompt can be continued (``None``: one for every four
    blocks, at least ``max_num_seqs``).
    """

    max_num_seqs: int = 8
    max_num_batched_tokens: int = 256
    max_model_len: int = 2048
    num_blocks: int | None = None
    precision: Precision = "checkpoint"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    speculative: SpeculativeConfig = SpeculativeConfig()
    async_scheduling: bool = True
    seed: int = 0
    decode_row_capacity: int | None = None
    decode_buckets: tuple[int, ...] | None = None
    prefill_buckets: tuple[int, ...] | None = None
    page_style: PageStyle = "padded"
    prefix_caching: bool = True
    num_prefix_tails: int | None = None

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "max_num_batched_tokens", "max_model_len"):
            value = getattr(self, name)
            _require(
                isinstance(value, int) and not isinstance(value, bool) and value > 0,
                f"{name} must be a positive integer, got {value!r}",
            )
        _require(
            self.num_blocks is None or self.num_blocks > 1,
            f"num_blocks must be at least 2 (one block is reserved), got {self.num_blocks}",
        )
        _require(
            self.precision in ("exact", "checkpoint"),
            f"precision must be 'exact' or 'checkpoint', got {self.precision!r}",
        )
        _require(self.dtype in ("bfloat16", "float32"), f"dtype must be 'bfloat16' or 'float32', got {self.dtype!r}")
        for name, largest in (
            ("decode_buckets", self.max_num_seqs),
            ("prefill_buckets", self.max_num_batched_tokens),
        ):
            sizes = getattr(self, name)
            _require(
                sizes is None or all(_is_int(size) and 0 < size <= largest for size in sizes),
                f"{name} must hold integers from 1 to {largest}, got {sizes!r}",
            )
        capacity = self.decode_row_capacity
        _require(capacity is None or _is_int(capacity), f"decode_row_capacity must be an integer, got {capacity!r}")
        _require(capacity is None or capacity > 0, f"decode_row_capacity must be positive, got {capacity}")
        _require(
            self.page_style in get_args(PageStyle),
            f"page_style must be one of {get_args(PageStyle)}, got {self.page_style!r}",
        )
        tails = self.num_prefix_tails
        _require(
            tails is None or (_is_int(tails) and tails >= 0),
            f"num_prefix_tails must be a non-negative integer, got {tails!r}",
        )
