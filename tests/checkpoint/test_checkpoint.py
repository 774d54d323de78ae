"""Files of the real format: names, bytes, round trips, and what is said of broken ones."""

from __future__ import annotations

import json
import shutil

import golden_rule
import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.checkpoint import (
    CheckpointError,
    build_checkpoint,
    codecs,
    load_params,
    orbax_store,
    tensor_table,
    tiny_config_json,
)
from dspark_jax.checkpoint.builder import encode
from dspark_jax.checkpoint.loader import INDEX_NAME
from dspark_jax.checkpoint.released import RELEASED
from dspark_jax.checkpoint.safetensors_io import SafetensorsFile, write_safetensors
from dspark_jax.config import ConfigError, ModelConfig
from dspark_jax.engine.build import abstract_model, convert, parameter_targets
from dspark_jax.models import Policy

FLASH, PRO = RELEASED["flash"], RELEASED["pro"]


def preview(config, **fields):
    kept = {name: value for name, value in config.items() if not name.startswith("dspark_")}
    return {**kept, "compress_ratios": config["compress_ratios"][:-2], **fields}


@pytest.mark.contract("T1")
@pytest.mark.parametrize(
    ("raw", "ratios", "count", "size"),
    [
        (FLASH, 46, 72_317, 166_878_536_440),
        ({**FLASH, "n_routed_experts": 160}, 46, 45_821, 107_803_320_952),
        (PRO, 64, 149_782, 892_727_580_904),
        (preview(FLASH, expert_dtype="fp8"), 44, 69_189 - 2, None),  # the file has two ignored duplicates besides
        (preview(PRO), 62, 145_118 - 2, None),
    ],
)
def test_totals_of_the_released_checkpoints(raw, ratios, count, size):
    assert len(raw["compress_ratios"]) == ratios
    table = tensor_table(ModelConfig.from_hf(raw))
    assert len(table) == count
    if size:
        assert sum(spec.num_bytes for spec in table.values()) == size
    if raw is FLASH:
        assert sum(name.startswith("mtp.") for name in table) == 4705


@pytest.fixture(scope="module")
def golden_checkpoint(golden):
    return golden / "tiny_checkpoint"


def test_golden_files_follow_from_the_rule_byte_for_byte(golden, golden_checkpoint):
    raw = golden_rule.config(golden, "tiny_checkpoint")
    table, law, seen = tensor_table(ModelConfig.from_hf(raw)), golden_rule.law(raw), 0
    for path in sorted(golden_checkpoint.glob("*.safetensors")):
        file = SafetensorsFile(path)
        for name in file.entries:
            if name.endswith(".scale"):
                continue
            for stored, (dtype, array) in encode(table, name, law).items():
                assert file.entries[stored].dtype == dtype
                np.testing.assert_array_equal(file.data(stored).view(np.uint8), array.view(np.uint8), err_msg=stored)
                seen += 1
    assert seen == len(table) == 349


def rewrite(source, target):
    for path in source.iterdir():
        if path.suffix == ".safetensors":
            file = SafetensorsFile(path)
            tensors = {name: (entry.dtype, file.data(name)) for name, entry in reversed(file.entries.items())}
            write_safetensors(target / path.name, tensors, file.metadata)
        else:
            shutil.copyfile(path, target / path.name)


def test_reading_and_rewriting_gives_the_same_bytes(golden_checkpoint, tmp_path):
    (tmp_path / "a").mkdir()
    rewrite(golden_checkpoint, tmp_path / "a")
    (tmp_path / "b").mkdir()
    built = build_checkpoint(tmp_path / "built", tiny_config_json(), seed=3)
    rewrite(built, tmp_path / "b")
    again = build_checkpoint(tmp_path / "again", tiny_config_json(), seed=3)
    for one, other in ((golden_checkpoint, tmp_path / "a"), (built, tmp_path / "b"), (built, again)):
        for path in one.iterdir():
            assert path.read_bytes() == (other / path.name).read_bytes(), path.name


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    config = tiny_config_json(
        "mtp", num_hidden_layers=2, compress_ratios=[0, 4, 0], n_routed_experts=2, num_hash_layers=1
    )
    return build_checkpoint(tmp_path_factory.mktemp("pristine"), config, seed=1)


@pytest.fixture
def broken(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "broken")
    return tmp_path / "broken"


def edit(directory, name, change):
    """Rewrites the file that holds ``name`` after ``change(tensors)``."""
    index = json.loads((directory / INDEX_NAME).read_text())
    path = directory / index["weight_map"][name]
    file = SafetensorsFile(path)
    tensors = {n: (e.dtype, np.array(file.data(n))) for n, e in file.entries.items()}
    change(tensors)
    write_safetensors(path, tensors)
    return path


def edit_index(directory, change):
    index = json.loads((directory / INDEX_NAME).read_text())
    change(index["weight_map"])
    (directory / INDEX_NAME).write_text(json.dumps(index))


NAME = "layers.1.attn.wkv.weight"
GATE = "layers.1.ffn.gate.weight"


def truncate(directory):
    path = directory / "model-00002-of-00005.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def remove(directory):
    edit(directory, NAME, lambda t: t.pop(NAME))
    edit_index(directory, lambda m: m.pop(NAME))


def rename(directory):
    edit(directory, NAME, lambda t: t.update({"layers.1.attn.wvk.weight": t.pop(NAME)}))
    edit_index(directory, lambda m: m.update({"layers.1.attn.wvk.weight": m.pop(NAME)}))


def transpose(directory):
    edit(directory, NAME, lambda t: t.update({NAME: (t[NAME][0], t[NAME][1].T)}))


def retype(directory):
    edit(directory, GATE, lambda t: t.update({GATE: ("F32", t[GATE][1].astype(np.float32))}))


def bad_experts(directory):
    name = "layers.0.ffn.gate.tid2eid"
    edit(directory, name, lambda t: t.update({name: ("I64", t[name][1] + 2)}))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (remove, rf"{NAME} is missing: expected F8_E4M3 \[128, 256\]"),
        (rename, r"layers.1.attn.wvk.weight \(F8_E4M3 \[128, 256\]\) is unexpected"),
        (transpose, rf"{NAME} has shape \[256, 128\]: expected \[128, 256\]"),
        (retype, rf"{GATE} has dtype F32: expected BF16"),
        (truncate, r"outside of the \d+ bytes of data \(truncated file\?\)"),
        (lambda d: edit_index(d, lambda m: m.update({NAME: "model-00001-of-00005.safetensors"})), "does not have it"),
        (lambda d: edit_index(d, lambda m: m.pop(NAME)), f"{INDEX_NAME} says 'nothing'"),
        (lambda d: edit_index(d, lambda m: m.update({NAME: "../evil.safetensors"})), "expected a plain name"),
        (lambda d: edit_index(d, lambda m: m.update({NAME: "no.safetensors"})), "no.safetensors: cannot be read"),
        (lambda d: (d / INDEX_NAME).write_text("{"), "cannot be read: Expecting"),
        (lambda d: (d / INDEX_NAME).write_text("[]"), "must have a weight_map"),
        (lambda d: (d / INDEX_NAME).unlink(), "has neither model.safetensors.index.json nor model.safetensors"),
        (bad_experts, r"layers.0.ffn.gate.tid2eid must hold expert ids in \[0, 2\), got"),
    ],
)
def test_every_damage_has_its_own_error(broken, damage, message):
    damage(broken)
    with pytest.raises(CheckpointError, match=message):
        load(broken)


def test_all_problems_are_listed_at_once(broken):
    remove(broken)
    retype(broken)
    with pytest.raises(CheckpointError) as error:
        load(broken)
    assert len(error.value.problems) == 2


def load(path, precision="checkpoint", dtype="bfloat16", **options):
    config = ModelConfig.from_dir(path)
    _, state = abstract_model(config, Policy.create(config, precision, dtype))
    return load_params(path, config, parameter_targets(state), progress=False, **options)


def test_quantised_and_decoded_parameters_agree(pristine):
    stored, dense = load(pristine), load(pristine, "exact", "float32")
    assert set(dense) < set(stored)
    name = "layers.1.ffn.experts.w2"
    for expert in range(2):
        codes, scales = np.asarray(stored[f"{name}.weight"][expert]), np.asarray(stored[f"{name}.scale"][expert])
        np.testing.assert_array_equal(codecs.decode_mxfp4(codes, scales), dense[f"{name}.weight"][expert])
    codes, scales = np.asarray(stored[NAME]), np.asarray(stored[NAME.replace("weight", "scale")])
    assert codes.dtype == ml_dtypes.float8_e4m3fn
    np.testing.assert_array_equal(codecs.decode_fp8(codes, scales), dense[NAME])


def test_a_sharding_reads_only_its_parts(pristine):
    """With a sharding the array arrives sharded and equal."""
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    names = ["layers.1.ffn.experts.w1.weight", NAME, "embed.weight"]
    sharded = load(pristine, shardings=dict.fromkeys(names, sharding))
    whole = load(pristine)
    for name in names:
        assert sharded[name].sharding == sharding
        np.testing.assert_array_equal(np.asarray(sharded[name]), np.asarray(whole[name]))


def test_ignored_duplicates_of_previews(pristine, tmp_path):
    shutil.copytree(pristine, tmp_path / "c")

    def add(tensors):
        for name in ("mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"):
            tensors[name] = ("BF16", np.zeros((512, 256), ml_dtypes.bfloat16))

    file = edit(tmp_path / "c", "mtp.0.e_proj.weight", add)
    extra = dict.fromkeys(("mtp.0.emb.tok_emb.weight", "mtp.0.head.weight"), file.name)
    edit_index(tmp_path / "c", lambda m: m.update(extra))
    assert set(load(tmp_path / "c")) == set(load(pristine))


def test_single_file(tmp_path, pristine):
    raw = json.loads((pristine / "config.json").read_text())
    single = build_checkpoint(tmp_path, raw, seed=1, sharded=False)
    one, many = load(single), load(pristine)
    assert all(np.array_equal(np.asarray(one[n]).view(np.uint8), np.asarray(many[n]).view(np.uint8)) for n in many)


def test_converted_store(pristine, tmp_path):
    store = convert(pristine, tmp_path / "store", precision="checkpoint", dtype="bfloat16", progress=False)
    assert orbax_store.is_converted(store)
    assert (store / "config.json").is_file()
    want, got = load(pristine), load(store)
    for name, array in want.items():
        assert got[name].dtype == array.dtype
        np.testing.assert_array_equal(np.asarray(got[name]).view(np.uint8), np.asarray(array).view(np.uint8))
    with pytest.raises(CheckpointError, match="converted for precision 'checkpoint', dtype 'bfloat16'"):
        load(store, "exact", "float32")
    with pytest.raises(CheckpointError, match="not an empty directory"):
        convert(pristine, store, precision="exact", dtype="float32", progress=False)


def test_other_architectures_are_refused_before_any_weight(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({**FLASH, "model_type": "deepseek_v41"}))
    with pytest.raises(ConfigError, match="'deepseek_v41' is not supported"):
        ModelConfig.from_dir(tmp_path)


def header(data, text, length=None):
    return (len(text) if length is None else length).to_bytes(8, "little") + text + data


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"123", "fewer than the 8"),
        (header(b"", b"{}", 10**18), "declares a header of 1000000000000000000 bytes"),
        (header(b"", b"nonsense"), "not valid JSON"),
        (header(b"", b"[" * 100_000), "not valid JSON"),
        (header(b"", b"[]"), "must be a JSON object"),
        (header(b"", b'{"a":1}'), "tensor 'a' must have"),
        (
            header(b"\0" * 8, b"{" + b'"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]},' * 2 + b'"b":1}'),
            "'a' twice",
        ),
        (header(b"\0" * 4, b'{"a":{"dtype":"F99","shape":[1],"data_offsets":[0,4]}}'), "unknown dtype 'F99'"),
        (header(b"\0" * 4, b'{"a":{"dtype":"F32","shape":[-1],"data_offsets":[0,4]}}'), "non-negative integers"),
        (header(b"\0" * 4, b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}'), "needs 8 bytes"),
        (header(b"\0" * 8, b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}'), "belong to no tensor"),
        (header(b"\0" * 8, b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'), "has 8 bytes of data"),
        (
            header(b"\0" * 4, b'{"a":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}'),
            "needs 73786976294838206464 bytes",
        ),
    ],
)
def test_headers_are_not_believed(tmp_path, content, message):
    path = tmp_path / "x.safetensors"
    path.write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        SafetensorsFile(path)


@settings(max_examples=150, deadline=None)
@given(st.data())
def test_damaged_headers_give_only_checkpoint_errors(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    write_safetensors(path, {"a": ("F32", np.ones((2, 3), np.float32)), "b": ("I64", np.ones(2, np.int64))})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 6))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    try:
        file = SafetensorsFile(path)
    except CheckpointError:
        return
    for name in file.entries:
        file.data(name)


def test_the_safetensors_package_reads_what_is_written(tmp_path):
    from safetensors.numpy import load_file

    x = np.arange(6, dtype=np.float32).reshape(2, 3)
    write_safetensors(tmp_path / "x.safetensors", {"x": ("F32", x), "i": ("I64", np.arange(3))}, {"format": "np"})
    got = load_file(tmp_path / "x.safetensors")
    np.testing.assert_array_equal(got["x"], x)
    assert jnp.asarray(got["i"]).tolist() == [0, 1, 2]
