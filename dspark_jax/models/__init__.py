"""DeepSeek-V4 and its drafters as Flax NNX modules. Parameter paths are the checkpoint's own tensor names."""

from dspark_jax.models.deepseek_v4 import DeepseekV4, Forward
from dspark_jax.models.layers import Policy
from dspark_jax.models.rows import Rows

__all__ = ["DeepseekV4", "Forward", "Policy", "Rows"]
