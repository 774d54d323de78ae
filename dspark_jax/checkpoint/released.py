"""Configurations of the released DSpark checkpoints: for planning and tests, where no file is at hand."""

from __future__ import annotations

from typing import Any

from dspark_jax.checkpoint.builder import tiny_config_json

_FLASH: dict[str, Any] = {
    **tiny_config_json(),
    "hidden_size": 4096,
    "num_hidden_layers": 43,
    "compress_ratios": [0, 0] + [4, 128] * 20 + [4, 0, 0, 0],
    "num_attention_heads": 64,
    "head_dim": 512,
    "q_lora_rank": 1024,
    "o_groups": 8,
    "o_lora_rank": 1024,
    "index_n_heads": 64,
    "index_topk": 512,
    "n_routed_experts": 256,
    "num_experts_per_tok": 6,
    "moe_intermediate_size": 2048,
    "num_hash_layers": 3,
    "vocab_size": 129280,
    "max_position_embeddings": 1048576,
    "dspark_noise_token_id": 128799,
    "dspark_target_layer_ids": [40, 41, 42],
    "dspark_markov_rank": 256,
}
_FLASH["rope_scaling"] = {**_FLASH["rope_scaling"], "original_max_position_embeddings": 65536}

RELEASED: dict[str, dict[str, Any]] = {
    "flash": _FLASH,
    "pro": {
        **_FLASH,
        "hidden_size": 7168,
        "num_hidden_layers": 61,
        "compress_ratios": [128, 128] + [4, 128] * 29 + [4, 0, 0, 0],
        "num_attention_heads": 128,
        "q_lora_rank": 1536,
        "o_groups": 16,
        "index_topk": 1024,
        "n_routed_experts": 384,
        "moe_intermediate_size": 3072,
        "routed_scaling_factor": 2.5,
        "dspark_target_layer_ids": [58, 59, 60],
        "dspark_markov_rank": 512,
    },
}
"""``config.json`` of DeepSeek-V4-Flash-0731 and DeepSeek-V4-Pro-0813, by short name."""
