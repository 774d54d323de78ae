"""Small checkpoints in exactly the real format, from a seed: for tests, demonstrations and experiments."""

from __future__ import annotations

import functools
import json
import pathlib
import zlib
from collections.abc import Callable, Mapping
from typing import Any, Literal

import ml_dtypes
import numpy as np

from dspark_jax.checkpoint import codecs
from dspark_jax.checkpoint.loader import INDEX_NAME, SINGLE_NAME
from dspark_jax.checkpoint.names import TensorSpec, tensor_table
from dspark_jax.checkpoint.safetensors_io import write_safetensors
from dspark_jax.config import ModelConfig

Law = Callable[[str, tuple[int, ...]], np.ndarray]


def tiny_config_json(draft: Literal["dspark", "mtp", "none"] = "dspark", **overrides: Any) -> dict[str, Any]:
    """A ``config.json`` with every field of the released ones and every kind of layer, small enough for two CPU cores.

    Six layers (sliding, CSA, HCA; hash and score routing) and three DSpark stages, one MTP block or no drafter.
    ``overrides`` replace fields.
    """
    ratios = [0, 4, 128, 4, 128, 0]
    stages = {"dspark": 3, "mtp": 1, "none": 0}[draft]
    config: dict[str, Any] = {
        "architectures": ["DeepseekV4ForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": 0,
        "compress_ratios": ratios + [0] * stages,
        "compress_rope_theta": 160000,
        "eos_token_id": 1,
        "expert_dtype": "fp4",
        "hc_eps": 1e-6,
        "hc_mult": 4,
        "hc_sinkhorn_iters": 20,
        "head_dim": 128,
        "hidden_act": "silu",
        "hidden_size": 256,
        "index_head_dim": 128,
        "index_n_heads": 16,
        "index_topk": 16,
        "initializer_range": 0.02,
        "max_position_embeddings": 8192,
        "model_type": "deepseek_v4",
        "moe_intermediate_size": 128,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": 4,
        "num_experts_per_tok": 2,
        "num_hash_layers": 3,
        "num_hidden_layers": len(ratios),
        "num_key_value_heads": 1,
        "num_nextn_predict_layers": 1 if stages else 0,
        "o_groups": 2,
        "o_lora_rank": 128,
        "q_lora_rank": 128,
        "qk_rope_head_dim": 64,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "scale_fmt": "ue8m0",
            "weight_block_size": [128, 128],
        },
        "rms_norm_eps": 1e-6,
        "rope_scaling": {
            "beta_fast": 32,
            "beta_slow": 1,
            "factor": 16,
            "original_max_position_embeddings": 512,
            "type": "yarn",
        },
        "rope_theta": 10000,
        "routed_scaling_factor": 1.5,
        "scoring_func": "sqrtsoftplus",
        "sliding_window": 128,
        "swiglu_limit": 10.0,
        "tie_word_embeddings": False,
        "topk_method": "noaux_tc",
        "torch_dtype": "bfloat16",
        "transformers_version": "4.57.1",
        "use_cache": True,
        "vocab_size": 512,
    }
    if draft == "dspark":
        config |= {
            "dspark_block_size": 5,
            "dspark_markov_rank": 32,
            "dspark_noise_token_id": 7,
            "dspark_target_layer_ids": [3, 4, 5],
        }
    return config | overrides


def random_tensor(name: str, shape: tuple[int, ...], *, seed: int, num_experts: int) -> np.ndarray:
    """A float32 tensor (int64 for ``tid2eid``) that depends on its name, shape and ``seed`` alone.

    Norms and stream scales are near one, biases and sinks visibly random (zeros hide bugs), embeddings standard normal,
    matrices scaled by their inputs.
    """
    rng = np.random.Generator(np.random.PCG64([seed, zlib.crc32(name.encode())]))
    if name.endswith(".tid2eid"):
        return rng.random((shape[0], num_experts)).argsort(1)[:, : shape[1]].astype(np.int64)
    x = rng.standard_normal(shape, np.float32)
    if name.endswith(("norm.weight", "_scale")):
        return 1 + 0.1 * x
    if name.endswith(("_base", "attn_sink", "gate.bias", "ape")):
        return 0.5 * x
    if name.endswith(("embed.weight", "markov_w1.weight")):
        return x
    return x / np.float32(np.sqrt(shape[-1]))


def encode(table: Mapping[str, TensorSpec], name: str, law: Law) -> dict[str, tuple[str, np.ndarray]]:
    """The stored tensors (``name -> (dtype, array)``) of one entry of the table, with its ``.scale`` if it has one."""
    spec = table[name]
    packed = spec.dtype == "I8"
    matrix = law(name, (spec.shape[0], 2 * spec.shape[1]) if packed else spec.shape)
    match spec.dtype:
        case "I8" | "F8_E4M3":
            codes, scales = (codecs.encode_mxfp4 if packed else codecs.encode_fp8)(matrix)
            return {name: (spec.dtype, codes), name.removesuffix(".weight") + ".scale": ("F8_E8M0", scales)}
        case "BF16":
            return {name: (spec.dtype, matrix.astype(ml_dtypes.bfloat16))}
        case "I64":
            return {name: (spec.dtype, matrix.astype(np.int64))}
    return {name: (spec.dtype, matrix.astype(np.float32))}


def _shard_of(name: str) -> str:
    """As the releases place tensors: embedding, each layer, what ends the trunk, each draft stage."""
    first, *rest = name.split(".")
    return f"{first}.{rest[0]}" if first in ("layers", "mtp") else ("embed" if first == "embed" else "head")


def build_checkpoint(
    directory: str | pathlib.Path,
    config_json: Mapping[str, Any],
    *,
    seed: int = 0,
    sharded: bool = True,
    law: Law | None = None,
) -> pathlib.Path:
    """Writes ``config.json`` and safetensors files with DeepSeek's names, dtypes and encodings. Returns the directory.

    ``law(name, shape)`` gives the float32 value of each tensor before encoding (default: ``random_tensor`` of
    ``seed``). ``sharded`` writes an index and one file per layer, otherwise a single file. The same arguments always
    give the same bytes. Raises ``ConfigError`` for a configuration that cannot be served.
    """
    config = ModelConfig.from_hf(config_json)
    table = tensor_table(config)
    if law is None:
        law = functools.partial(random_tensor, seed=seed, num_experts=config.n_routed_experts)
    shards: dict[str, list[str]] = {}
    for name, spec in table.items():
        if spec.dtype != "F8_E8M0":
            shards.setdefault(_shard_of(name) if sharded else SINGLE_NAME, []).append(name)
    directory = pathlib.Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    weight_map, total = {}, 0
    for number, names in enumerate(shards.values(), start=1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors" if sharded else SINGLE_NAME
        tensors: dict[str, tuple[str, np.ndarray]] = {}
        for name in names:
            tensors |= encode(table, name, law)
        total += write_safetensors(directory / file, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys(tensors, file)
    if sharded:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (directory / INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    (directory / "config.json").write_text(json.dumps(dict(config_json), indent=2) + "\n", encoding="utf-8")
    return directory
