"""The stride of cache pages changes neither results nor memory."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from flax import nnx
from small_models import small_config

from dspark_jax.cache.allocator import SlotPool
from dspark_jax.cache.groups import CacheLayouts
from dspark_jax.checkpoint import build_checkpoint
from dspark_jax.config import ConfigError, EngineConfig, ModelConfig
from dspark_jax.engine.buckets import DecodeShape, StepShapes
from dspark_jax.engine.build import load_model
from dspark_jax.engine.runner import ModelRunner
from dspark_jax.models import DeepseekV4, Policy
from dspark_jax.spec_decode.staging import DraftCapacities
from dspark_jax.testing import Session

CONFIG = small_config(head_dim=512)  # rows of 584 bytes
# Two layers and one draft stage: every kind of page, and quick to compile.
SHALLOW = {
    **CONFIG,
    "num_hidden_layers": 2,
    "compress_ratios": [4, 128, 0],
    "dspark_target_layer_ids": [0, 1],
}


@pytest.fixture(scope="module")
def packed_model(tmp_path_factory):
    path = build_checkpoint(tmp_path_factory.mktemp("packed"), SHALLOW, seed=2)
    config = ModelConfig.from_dir(path)
    return load_model(path, config, Policy.create(config, "checkpoint", "bfloat16"), progress=False)


def layouts(style, **options):
    sizes = {"num_blocks": 9, "num_window_pages": 9, "max_num_seqs": 2, "max_rollback": 3, "dtype": "bfloat16"}
    config = ModelConfig.from_hf({**CONFIG, **options})
    return CacheLayouts.create(config, precision="checkpoint", page_style=style, **sizes)


def test_strides_and_offsets():
    contiguous, padded, packed = map(layouts, ("contiguous", "padded", "packed_blocks"))
    assert [x.window.page_stride for x in contiguous.trunk] == [37_376] * 4
    assert [x.window.page_stride for x in padded.trunk] == [37_440] * 4
    assert contiguous.trunk[2].entries.page_stride == 1168
    assert padded.trunk[2].entries.page_stride == 1728
    # Ratios 0, 4, 128, 4: three layers have entries, side by side in one stride.
    assert {x.window.page_stride for x in packed.trunk} == {4 * 37_440}
    assert [x.window.base_offset for x in packed.trunk] == [0, 37_440, 74_880, 112_320]
    assert [x.entries.base_offset for x in packed.trunk[1:]] == [0, 37_440, 39_168]
    assert {x.entries.page_stride for x in packed.trunk[1:]} == {2 * 37_440 + 1728}
    assert [x.window.base_offset for x in packed.draft] == [0, 37_440, 74_880]
    with pytest.raises(
        ConfigError, match=r"page_style 'contiguous' needs rows of 584 bytes: .*head_dim 512, .*and 128"
    ):
        layouts("contiguous", head_dim=128)


@pytest.mark.contract("PV-13", "PV-15")
def test_results_do_not_depend_on_the_style(packed_model):
    """Logits, drafts and stored entries, bit for bit, over pages, blocks and a rollback. The ratio-128 pages have
    strides of 1,168 bytes (16-byte aligned only) and 1,728; whatever is padding begins as 0xFF."""
    tokens = np.random.default_rng(0).integers(8, 320, 180)
    results = {}
    for style in ("contiguous", "padded", "packed_blocks"):
        session = Session(packed_model, 512, page_style=style)
        if style != "contiguous":
            session.trunk = jax.tree.map(poisoned, session.trunk)
            session.drafter = jax.tree.map(poisoned, session.drafter)
        chunks = [session.extend(tokens[start : start + 60]) for start in (0, 60, 120)]
        session.rollback(125)
        again = session.extend(tokens[125:])
        for i, chunk in enumerate(chunks):
            session.commit(chunk.taps, 60 * i)
        block = session.draft(5, 180)
        results[style] = [*(chunk.logits for chunk in chunks), again.logits, np.asarray(block.base_logits)]
    for style in ("padded", "packed_blocks"):
        for got, want in zip(results[style], results["contiguous"], strict=True):
            np.testing.assert_array_equal(got, want)


def poisoned(array):
    """A byte cache full of 0xFF; state rings stay zero."""
    return array - 1 if array.dtype == np.int32 else array


@pytest.mark.contract("PV-14")
@pytest.mark.parametrize("style", ["padded", "packed_blocks"])
def test_a_step_neither_copies_nor_doubles_the_cache(style):
    """The buffer assignment of compiled steps over a cache of 6.7 GB (which is never allocated): every byte of it is
    updated in place, and temporaries are below 1 % of it."""
    config = ModelConfig.from_hf(SHALLOW)
    engine = EngineConfig(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=512,
        num_blocks=60_000,
        num_prefix_tails=30_000,
        page_style=style,
    )
    policy = Policy.create(config, "checkpoint", "bfloat16")
    model = nnx.eval_shape(lambda: DeepseekV4(config, policy, rngs=nnx.Rngs(0)))
    shapes = StepShapes.create(config, engine)
    runner = ModelRunner(model, engine, shapes, DraftCapacities(SlotPool(4), 3), allocate=False)
    state = runner._held_state()
    num_bytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((state.trunk, state.draft)))
    assert num_bytes > 6.7e9
    for bucket in (DecodeShape(4, 3), 64) if style == "packed_blocks" else (DecodeShape(4, 3),):
        memory = runner.lower(bucket).compile().memory_analysis()
        assert memory.alias_size_in_bytes >= num_bytes
        assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 0.01 * num_bytes
        assert memory.temp_size_in_bytes < 0.01 * num_bytes
