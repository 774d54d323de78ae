"""From a checkpoint directory to a model, and to a warmed-up engine with its tokenizer."""

from __future__ import annotations

import logging
import os
import pathlib
import shutil
import tempfile

import jax
from flax import nnx

from dspark_jax.checkpoint import build_checkpoint, load_params, tiny_config_json
from dspark_jax.checkpoint.orbax_store import save_converted
from dspark_jax.config import EngineConfig, ModelConfig, Precision
from dspark_jax.engine.engine import LLMEngine
from dspark_jax.models import DeepseekV4, Policy
from dspark_jax.text.byte_tokenizer import write_byte_tokenizer
from dspark_jax.text.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEFAULT_MODEL_NAME = "dspark-tiny-random"
# Part of the directory's name: raise it whenever the generated files change.
_DEFAULT_MODEL_VERSION = 1


def abstract_model(config: ModelConfig, policy: Policy) -> tuple[nnx.GraphDef[DeepseekV4], nnx.State]:
    """The model's graph and its parameters as shapes and dtypes: nothing is allocated."""
    return nnx.split(nnx.eval_shape(lambda: DeepseekV4(config, policy, rngs=nnx.Rngs(0))))


def parameter_targets(state: nnx.State) -> dict[str, jax.ShapeDtypeStruct]:
    """Dotted parameter paths (DeepSeek's tensor names, experts stacked) and what each should become."""
    flat = nnx.to_flat_state(state)
    return {".".join(map(str, path)): jax.ShapeDtypeStruct(leaf.shape, leaf.dtype) for path, leaf in flat}


def assemble(graph: nnx.GraphDef[DeepseekV4], state: nnx.State, params: dict[str, jax.Array]) -> DeepseekV4:
    """A model from its graph and parameters by dotted path. Raises ``KeyError`` if one is missing."""
    leaves = [(path, leaf.replace(params[".".join(map(str, path))])) for path, leaf in nnx.to_flat_state(state)]
    return nnx.merge(graph, nnx.from_flat_state(leaves))


def load_model(path: str | pathlib.Path, config: ModelConfig, policy: Policy, *, progress: bool = True) -> DeepseekV4:
    """Reads a checkpoint directory straight into the model's dtypes. Raises ``CheckpointError`` listing every
    problem."""
    graph, state = abstract_model(config, policy)
    return assemble(graph, state, load_params(path, config, parameter_targets(state), progress=progress))


def convert(
    source: str | pathlib.Path, target: str | pathlib.Path, *, precision: Precision, dtype: str, progress: bool = True
) -> pathlib.Path:
    """Stores the parameters of a checkpoint as this precision and dtype need them. Returns the new directory.

    Raises ``ConfigError`` or ``CheckpointError``, before anything is written if the source is at fault.
    """
    config = ModelConfig.from_dir(source)
    _, state = abstract_model(config, Policy.create(config, precision, dtype))
    params = load_params(source, config, parameter_targets(state), progress=progress)
    return save_converted(target, source, params, precision=precision, dtype=dtype)


def _cache_home() -> pathlib.Path:
    return pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache") / "dspark_jax"


def use_compilation_cache() -> None:
    """Keeps compiled steps on disk, next to the generated checkpoint: the second start of a server skips compiling.

    ``JAX_COMPILATION_CACHE_DIR`` names another place. For programs, not for libraries: it is a setting of the process.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(_cache_home() / "compiled"))


def default_checkpoint(cache_dir: str | pathlib.Path | None = None) -> pathlib.Path:
    """The tiny checkpoint that is served without ``--model``: random weights from a fixed seed, in the real format.

    Written once below ``cache_dir`` (default: ``$XDG_CACHE_HOME/dspark_jax`` or ``~/.cache/dspark_jax``), atomically,
    so that several starts at once are safe.
    """
    target = pathlib.Path(cache_dir or _cache_home()) / f"{DEFAULT_MODEL_NAME}-v{_DEFAULT_MODEL_VERSION}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        work = pathlib.Path(tempfile.mkdtemp(dir=target.parent, prefix=".building-"))
        try:
            config = tiny_config_json()
            build_checkpoint(work, config, seed=0)
            write_byte_tokenizer(work, config["vocab_size"])
            try:
                work.rename(target)
            except OSError:
                if not target.is_dir():  # not the race with another start that we expect
                    raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return target


def build_engine(
    model_dir: str | pathlib.Path | None, config: EngineConfig, *, progress: bool = True
) -> tuple[LLMEngine, Tokenizer]:
    """A warmed-up engine and its tokenizer. ``model_dir`` None serves the generated tiny checkpoint.

    Raises ``ConfigError``, ``CheckpointError`` or ``TokenizerError`` before anything is compiled.
    """
    if model_dir is None:
        model_dir = default_checkpoint()
        logger.warning("no model given: serving a generated tiny checkpoint whose WEIGHTS ARE RANDOM (%s)", model_dir)
    model_config = ModelConfig.from_dir(model_dir)
    tokenizer = Tokenizer.from_dir(model_dir)
    policy = Policy.create(model_config, config.precision, config.dtype)
    model = load_model(model_dir, model_config, policy, progress=progress)
    return LLMEngine(model, config, progress=progress), tokenizer
