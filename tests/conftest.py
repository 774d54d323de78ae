"""Shared fixtures. Warnings are errors; every exception to that has its reason beside it in pyproject.toml."""

from __future__ import annotations

import atexit
import os
import pathlib
import re
import shutil
import tempfile
import zlib

# Before JAX is imported: tests run on the CPU (unless a GPU run asks otherwise) and two workers share two cores.
if "DSPARK_TEST_GPU" not in os.environ:
    os.environ["JAX_PLATFORMS"] = "cpu"
# Pallas' GPU interpreter blocks a thread of XLA's pool for each of the kernel's threads; with one per core it hangs.
os.environ.setdefault("NPROC", "16")
# The workers of one run compile each program once between them. Nothing is kept from run to run.
if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
    _compiled = tempfile.mkdtemp(prefix="dspark-jax-tests-")
    os.environ["JAX_COMPILATION_CACHE_DIR"] = _compiled
    os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0.2"
    atexit.register(shutil.rmtree, _compiled, ignore_errors=True)

import numpy as np
import pytest

GOLDEN = pathlib.Path(__file__).parent / "golden"


@pytest.fixture
def rng(request: pytest.FixtureRequest) -> np.random.Generator:
    """Random numbers whose seed is the test's own name: stable under reordering and selection."""
    return np.random.default_rng(zlib.crc32(request.node.nodeid.encode()))


@pytest.fixture(scope="session")
def golden() -> pathlib.Path:
    """Directory of golden data."""
    return GOLDEN


# -- contract ids: `pytest --contracts` ends with one line for each ---------------------------------------------------
_OUTCOMES = ("failed", "passed", "skipped", "not run")  # the first that applies to any test of an id


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--contracts", action="store_true", help="end with the outcome of every contract id")


def _contract_ids(item: pytest.Item) -> list[str]:
    return [contract for marker in item.iter_markers("contract") for contract in marker.args]


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        # Properties travel with the reports, from worker processes too.
        item.user_properties += [("contract", contract) for contract in _contract_ids(item)]
        if item.get_closest_marker("gpu") and "DSPARK_TEST_GPU" not in os.environ:
            item.add_marker(pytest.mark.skip(reason="needs a GPU: set DSPARK_TEST_GPU=1 on a machine that has one"))


class ContractReport:
    """Outcomes by contract id. Deselected tests leave ``not run``; workers send theirs home when they end."""

    def __init__(self, config: pytest.Config):
        self._config = config
        self._outcomes: dict[str, set[str]] = {}

    def pytest_deselected(self, items: list[pytest.Item]) -> None:
        for item in items:
            for contract in _contract_ids(item):
                self._outcomes.setdefault(contract, set()).add("not run")

    def pytest_sessionfinish(self) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["not_run"] = [c for c, found in self._outcomes.items() if "not run" in found]

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node) -> None:
        for contract in getattr(node, "workeroutput", {}).get("not_run", ()):
            self._outcomes.setdefault(contract, set()).add("not run")

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.when == "call" or report.outcome != "passed":
            for name, contract in report.user_properties:
                if name == "contract":
                    self._outcomes.setdefault(str(contract), set()).add(report.outcome)

    def pytest_terminal_summary(self, terminalreporter) -> None:
        terminalreporter.section("contracts")
        for contract in sorted(self._outcomes, key=_by_number):
            found = self._outcomes[contract]
            terminalreporter.write_line(f"{contract} {next(o for o in _OUTCOMES if o in found)}")


def _by_number(contract: str) -> list[tuple[bool, int, str]]:
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in re.split(r"(\d+)", contract)]


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--contracts") or hasattr(config, "workeroutput"):
        config.pluginmanager.register(ContractReport(config), "contract-report")
