"""Checkpoints: DeepSeek's safetensors directories, and a store of converted parameters."""

from dspark_jax.checkpoint.builder import build_checkpoint, tiny_config_json
from dspark_jax.checkpoint.errors import CheckpointError
from dspark_jax.checkpoint.loader import load_params
from dspark_jax.checkpoint.names import TensorSpec, tensor_table

__all__ = ["CheckpointError", "TensorSpec", "build_checkpoint", "load_params", "tensor_table", "tiny_config_json"]
