"""Which tensors a checkpoint holds: names, stored shapes and dtypes, from the configuration alone."""

from __future__ import annotations

import dataclasses
import math

from dspark_jax.config import ModelConfig

ITEM_BYTES = {"F32": 4, "BF16": 2, "F8_E4M3": 1, "F8_E8M0": 1, "I8": 1, "I64": 8}

# Preview checkpoints repeat the embedding and the head in their MTP block. The copies are shared, so they are skipped.
IGNORED_DUPLICATES = ("mtp.0.emb.tok_emb.weight", "mtp.0.head.weight")


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A stored tensor: its dtype in safetensors' names and its stored shape (MXFP4: packed columns)."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        return math.prod(self.shape) * ITEM_BYTES[self.dtype]


class _Table(dict[str, TensorSpec]):
    """Tensors under construction, with a method for each kind."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.config = config
        self.float = "F32" if config.linear_dtype == "fp32" else "BF16"

    def plain(self, name: str, *shape: int) -> None:
        """In the checkpoint's floating-point dtype."""
        self[name] = TensorSpec(self.float, shape)

    def f32(self, name: str, *shape: int) -> None:
        self[name] = TensorSpec("F32", shape)

    def matrix(self, name: str, rows: int, columns: int, storage: str | None = None) -> None:
        """A linear layer ``name.weight`` and, when it is quantised, ``name.scale``."""
        storage = storage or self.config.linear_dtype
        if storage == "fp8":
            self[f"{name}.weight"] = TensorSpec("F8_E4M3", (rows, columns))
            self[f"{name}.scale"] = TensorSpec("F8_E8M0", (-(-rows // 128), -(-columns // 128)))
        elif storage == "fp4":
            self[f"{name}.weight"] = TensorSpec("I8", (rows, columns // 2))
            self[f"{name}.scale"] = TensorSpec("F8_E8M0", (rows, columns // 32))
        else:
            self.plain(f"{name}.weight", rows, columns)

    def stream_head(self, prefix: str) -> None:
        m, d = self.config.hc_mult, self.config.hidden_size
        self.f32(f"{prefix}hc_head_fn", m, m * d)
        self.f32(f"{prefix}hc_head_base", m)
        self.f32(f"{prefix}hc_head_scale", 1)

    def compressor(self, name: str, ratio: int, width: int) -> None:
        channels = width * (2 if ratio == 4 else 1)
        self.plain(f"{name}.wkv.weight", channels, self.config.hidden_size)
        self.plain(f"{name}.wgate.weight", channels, self.config.hidden_size)
        self.f32(f"{name}.ape", ratio, channels)
        self.plain(f"{name}.norm.weight", width)

    def block(self, prefix: str, layer: int, ratio: int) -> None:
        c = self.config
        d, m, attn, ffn = c.hidden_size, c.hc_mult, f"{prefix}attn.", f"{prefix}ffn."
        self.plain(f"{prefix}attn_norm.weight", d)
        self.plain(f"{prefix}ffn_norm.weight", d)
        for half in ("attn", "ffn"):
            self.f32(f"{prefix}hc_{half}_fn", (2 + m) * m, m * d)
            self.f32(f"{prefix}hc_{half}_base", (2 + m) * m)
            self.f32(f"{prefix}hc_{half}_scale", 3)
        self.f32(f"{attn}attn_sink", c.num_attention_heads)
        self.matrix(f"{attn}wq_a", c.q_lora_rank, d)
        self.plain(f"{attn}q_norm.weight", c.q_lora_rank)
        self.matrix(f"{attn}wq_b", c.num_attention_heads * c.head_dim, c.q_lora_rank)
        self.matrix(f"{attn}wkv", c.head_dim, d)
        self.plain(f"{attn}kv_norm.weight", c.head_dim)
        self.matrix(f"{attn}wo_a", c.o_groups * c.o_lora_rank, c.num_attention_heads * c.head_dim // c.o_groups)
        self.matrix(f"{attn}wo_b", d, c.o_groups * c.o_lora_rank)
        if ratio:
            self.compressor(f"{attn}compressor", ratio, c.head_dim)
        if ratio == 4:
            self.matrix(f"{attn}indexer.wq_b", c.index_n_heads * c.index_head_dim, c.q_lora_rank)
            self.plain(f"{attn}indexer.weights_proj.weight", c.index_n_heads, d)
            self.compressor(f"{attn}indexer.compressor", 4, c.index_head_dim)
        self.plain(f"{ffn}gate.weight", c.n_routed_experts, d)
        if c.is_hash_layer(layer):
            self[f"{ffn}gate.tid2eid"] = TensorSpec("I64", (c.vocab_size, c.num_experts_per_tok))
        else:
            self.f32(f"{ffn}gate.bias", c.n_routed_experts)
        for expert in range(c.n_routed_experts):
            self.swiglu(f"{ffn}experts.{expert}", c.moe_intermediate_size, c.expert_dtype)
        self.swiglu(f"{ffn}shared_experts", c.shared_intermediate_size, c.linear_dtype)

    def swiglu(self, name: str, inner: int, storage: str) -> None:
        d = self.config.hidden_size
        self.matrix(f"{name}.w1", inner, d, storage)
        self.matrix(f"{name}.w2", d, inner, storage)
        self.matrix(f"{name}.w3", inner, d, storage)

    def draft(self) -> None:
        c = self.config
        d = c.hidden_size
        for stage in range(c.num_draft_stages):
            self.block(f"mtp.{stage}.", c.num_hidden_layers + stage, 0)
        if c.draft_kind == "mtp":
            for name in ("e_proj", "h_proj"):
                self.matrix(f"mtp.0.{name}", d, d)
            for name in ("enorm", "hnorm", "norm"):
                self.plain(f"mtp.0.{name}.weight", d)
            self.stream_head("mtp.0.")
        elif c.draft_kind == "dspark":
            self.matrix("mtp.0.main_proj", d, len(c.dspark_target_layer_ids) * d)
            self.plain("mtp.0.main_norm.weight", d)
            last = f"mtp.{c.num_draft_stages - 1}."
            self.plain(f"{last}norm.weight", d)
            self.stream_head(last)
            for name in ("markov_w1", "markov_w2"):
                self.plain(f"{last}markov_head.{name}.weight", c.vocab_size, c.dspark_markov_rank)
            self.plain(f"{last}confidence_head.proj.weight", 1, d + c.dspark_markov_rank)


def tensor_table(config: ModelConfig) -> dict[str, TensorSpec]:
    """Every tensor that a checkpoint of this configuration must hold, by DeepSeek's name.

    The duplicates that a preview checkpoint may hold besides (``IGNORED_DUPLICATES``) are left out.
    Source: model specification, section 3.1; DSpark specification, section 2.
    """
    table = _Table(config)
    table.plain("embed.weight", config.vocab_size, config.hidden_size)
    for layer, ratio in enumerate(config.compress_ratios):
        table.block(f"layers.{layer}.", layer, ratio)
    table.plain("head.weight", config.vocab_size, config.hidden_size)
    table.plain("norm.weight", config.hidden_size)
    table.stream_head("")
    table.draft()
    return dict(table)


def duplicate_specs(config: ModelConfig) -> dict[str, TensorSpec]:
    """The duplicates that may be there and are skipped, with what they must look like."""
    if config.draft_kind != "mtp":
        return {}
    table = _Table(config)
    for name in IGNORED_DUPLICATES:
        table.plain(name, config.vocab_size, config.hidden_size)
    return dict(table)
