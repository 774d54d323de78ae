"""Instruments for tests of this engine, by us and by anyone who checks us.

* ``oracle_generate``, ``Oracle``: what greedy decoding must give, by recomputing everything at every step.
* ``ForcedDrafter``: drafts that are right with a given probability.
* ``ScriptedEngine``: an engine that replays given tokens, for tests of texts and servers.
* ``Session``: one sequence driven by hand through the model.
* ``build_checkpoint``, ``tiny_config_json``: small checkpoints of any configuration in the real format.
"""

from dspark_jax.checkpoint import build_checkpoint, tiny_config_json
from dspark_jax.testing.forced import ForcedDrafter
from dspark_jax.testing.oracle import Oracle, OracleResult, oracle_generate
from dspark_jax.testing.scripted import ScriptedEngine
from dspark_jax.testing.session import Session

__all__ = [
    "ForcedDrafter",
    "Oracle",
    "OracleResult",
    "ScriptedEngine",
    "Session",
    "build_checkpoint",
    "oracle_generate",
    "tiny_config_json",
]
