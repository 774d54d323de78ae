"""Configurations small enough to compile in seconds, with every kind of layer."""

from __future__ import annotations

from dspark_jax.checkpoint import tiny_config_json

# The tiny configuration made smaller still: every kind of layer once.
SMALL = {
    "num_hidden_layers": 4,
    "num_hash_layers": 1,
    "hidden_size": 128,
    "num_attention_heads": 2,
    "vocab_size": 320,
    "sliding_window": 32,
    "index_topk": 8,
    "dspark_target_layer_ids": [1, 2, 3],
    "dspark_block_size": 3,
}


def small_config(draft="dspark", **overrides):
    fields = {**SMALL, **overrides}
    if draft != "dspark":
        fields = {name: value for name, value in fields.items() if not name.startswith("dspark_")}
    stages = {"dspark": 3, "mtp": 1, "none": 0}[draft]
    return tiny_config_json(draft, compress_ratios=[0, 4, 128, 4] + [0] * stages, **fields)
