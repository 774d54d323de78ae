"""The bench around the measurement: what it reports, compares and refuses. Times come from a scripted clock."""

from __future__ import annotations

import dataclasses
import subprocess
import sys

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import bench
from pallas_kernels._bench import Case, relative_error, rotations
from pallas_kernels.compressed_mla import benchmark
from pallas_kernels.compressed_mla.shapes import SHAPES


def function(implementation, **options):
    if implementation == "absent":
        raise NotImplementedError("needs another device")
    wrong = 0.1 if implementation == "wrong" else 0.0
    return lambda x: x + wrong


CASE = Case("small", [jnp.ones(4)], function, floor_us=10.0, tolerance=1e-2, peer={"case": "flash", "rows": 6})


def clock(function, sets):
    return 40.0


def test_a_record_holds_the_time_only_of_a_right_result():
    want = jnp.ones(4)
    right = bench.measure("op", CASE, "reference", {"regs": 1}, want, clock)
    assert (right.us, right.error, right.reason) == (40.0, 0.0, "")
    assert "25.0%" in bench.line(right, peer=60.0)
    assert "1.50x" in bench.line(right, peer=60.0)
    wrong = bench.measure("op", CASE, "wrong", {}, want, clock)
    assert wrong.us is None
    assert wrong.reason == "wrong: error 1.0e-01 > 1.0e-02"
    absent = bench.measure("op", CASE, "absent", {}, want, clock)
    assert absent.reason == "NotImplementedError: needs another device"
    assert "needs another device" in bench.line(absent, None)


def test_nan_is_never_right():
    case = dataclasses.replace(CASE, function=lambda _: lambda x: x * jnp.nan)
    assert bench.measure("op", case, "reference", {}, jnp.ones(4), clock).us is None
    assert np.isnan(relative_error(np.array([np.nan]), np.ones(1)))


def test_the_peer_is_the_best_matching_record():
    results = [
        {"case": "flash", "rows": 6, "us": 15.0},
        {"case": "flash", "rows": 6, "us": 14.0},
        {"case": "flash", "rows": 64, "us": 1.0},
    ]
    assert bench.peer_us(results, CASE) == 14.0
    assert bench.peer_us(results[2:], CASE) is None
    assert bench.peer_us(results, dataclasses.replace(CASE, peer={})) is None


def test_the_chart_is_a_picture(tmp_path):
    records = [
        dataclasses.replace(bench.measure("op", CASE, "reference", {}, jnp.ones(4), clock), shape=shape)
        for shape in ("one", "two")
    ]
    records.append(bench.measure("op", CASE, "absent", {}, None, clock))
    bench.chart(records, {"one": 50.0, "two": None}, tmp_path / "chart.png", "title")
    assert (tmp_path / "chart.png").read_bytes().startswith(b"\x89PNG")


def test_inputs_outgrow_the_cache():
    assert rotations(200 << 20) == 3
    assert rotations(10 << 20) * 10 >= 100
    assert rotations(1) == 48


@pytest.mark.parametrize("name", ["flash_csa_6_shared", "flash_hca_6_256k_shared", "flash_csa_6"])
def test_lists_are_what_the_shape_says(name):
    shape = SHAPES[name]
    window, indexed = (np.asarray(x) for x in benchmark._lists(shape, 0))
    assert (window.shape, indexed.shape) == ((shape.rows, shape.window), (shape.rows, shape.indexed))
    assert (np.diff(window, axis=1) == 1).all()
    assert all(len(set(row)) == shape.indexed for row in indexed.tolist())
    assert 0 <= indexed.min() <= indexed.max() < 1 << 22
    unique = len(np.unique(indexed))
    if shape.share == 1:
        assert unique == indexed.size
    else:
        assert unique <= shape.rows // shape.share * shape.indexed * 9 // 8
        np.testing.assert_array_equal(window[1], window[0] + 1)


@pytest.mark.parametrize(
    ("name", "want"), [("flash_csa_384", 45), ("flash_csa_768", 91), ("flash_tp4_csa_384", 37), ("pro_csa_384", 147)]
)
def test_floors_are_those_of_the_peers_table(name, want):
    """Within a microsecond of the figures computed with the same rates for the same shapes."""
    shape = SHAPES[name]
    assert benchmark.floor_us(shape, shape.rows * (shape.window + shape.indexed)) == pytest.approx(want, abs=1)


def test_bad_arguments_and_a_missing_gpu_are_named():
    def call(*arguments):
        command = [sys.executable, "-m", "pallas_kernels.bench", *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    unknown = call("compressed_mla", "--shapes", "flash_csa_7")
    assert unknown.returncode == 2
    assert "got flash_csa_7" in unknown.stderr
    nowhere = call("compressed_mla")
    assert nowhere.returncode == 2
    assert "needs a GPU: JAX's default backend is 'cpu'" in nowhere.stderr
    assert nowhere.stdout == ""
