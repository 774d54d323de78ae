"""``python -m pallas_kernels.bench compressed_mla``: an operation's implementations side by side on this GPU.

Every named shape is computed by every implementation, compared with the last of them (the reference), and timed:
device time in kernels, inputs rotated past the L2 cache, the median of several runs. Times stand beside the floor of
the shape and, with ``--peer``, beside a peer's times from its own benchmark's JSON file.
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

# Kernels inside a replayed graph would be recorded as one.
os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_gpu_enable_command_buffer="

import jax

from pallas_kernels._bench import Case, device_time_us, relative_error

OPS = ("compressed_mla",)


@dataclasses.dataclass(frozen=True)
class Record:
    """One implementation on one shape. ``error`` is relative to the reference; ``reason`` says why there is no time."""

    op: str
    shape: str
    implementation: str
    options: dict[str, Any]
    us: float | None
    floor_us: float
    error: float | None = None
    reason: str = ""


def measure(
    op: str, case: Case, implementation: str, options: dict[str, Any], want: Any, clock: Callable[..., float]
) -> Record:
    """Runs, checks against ``want`` and times. Whatever goes wrong becomes the record's reason."""
    record = Record(op, case.name, implementation, options, None, case.floor_us)
    try:
        function = case.function(implementation, **options)
        error = None if want is None else relative_error(function(case.sets[0]), want)
        if error is not None and not error <= case.tolerance:
            return dataclasses.replace(record, error=error, reason=f"wrong: error {error:.1e} > {case.tolerance:.1e}")
        return dataclasses.replace(record, us=clock(function, case.sets), error=error)
    except Exception as error:
        return dataclasses.replace(record, reason=f"{type(error).__name__}: {str(error)[:200]}")


def peer_us(results: Sequence[dict[str, Any]], case: Case) -> float | None:
    """The peer's shortest time for the case, ``None`` if it has none."""
    times = [r["us"] for r in results if case.peer and all(r.get(k) == v for k, v in case.peer.items())]
    return min(times, default=None)


def line(record: Record, peer: float | None) -> str:
    options = " ".join(f"{k}={v}" for k, v in record.options.items())
    name = f"{record.shape:26s} {record.implementation:10s}"
    if record.us is None:
        return f"{name} {'-':>8s}  {record.reason} {options}"
    against = f"{peer:8.1f} {peer / record.us:6.2f}x" if peer else f"{'-':>8s} {'-':>7s}"
    error = "-" if record.error is None else f"{record.error:.1e}"
    percent = 100 * record.floor_us / record.us
    return f"{name} {record.us:8.1f} {record.floor_us:8.1f} {percent:6.1f}% {against} {error:>8s} {options}"


HEADER = (
    f"{'shape':26s} {'':10s} {'us':>8s} {'floor':>8s} {'of floor':>7s} {'peer us':>8s} {'faster':>7s} {'error':>8s}"
)


def chart(records: Sequence[Record], peers: dict[str, float | None], path: pathlib.Path, title: str) -> None:
    """A bar per implementation and shape, on a logarithmic axis, with the peer's bar and a mark at the floor."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    shapes = list(dict.fromkeys(r.shape for r in records))
    names = list(dict.fromkeys(r.implementation for r in records))
    bars = {name: {r.shape: r.us for r in records if r.implementation == name} for name in names}
    if any(peers.values()):
        bars["peer"] = peers
    figure, axes = plt.subplots(figsize=(9, 1.2 + 0.18 * len(shapes) * (len(bars) + 1)), layout="constrained")
    height = 0.8 / len(bars)
    for i, (name, times) in enumerate(bars.items()):
        at = [k + (i - (len(bars) - 1) / 2) * height for k in range(len(shapes))]
        values = [times.get(shape) or float("nan") for shape in shapes]
        drawn = axes.barh(at, values, height=height, label=name)
        axes.bar_label(drawn, fmt=lambda x: f"{x:.1f}" if x == x else "", padding=2, fontsize=7)
    floors = {r.shape: r.floor_us for r in records}
    for k, shape in enumerate(shapes):
        axes.plot([floors[shape]] * 2, [k - 0.45, k + 0.45], color="black", lw=1.2, label=None if k else "floor")
    axes.set(yticks=range(len(shapes)), yticklabels=shapes, xscale="log", xlabel="us per call (device time)")
    axes.set_title(title, fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.legend(fontsize=8, loc="upper right")
    figure.savefig(path, dpi=120)
    plt.close(figure)


def environment() -> dict[str, str]:
    """What the numbers depend on."""
    device = jax.devices()[0]
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split()[0]
    except (OSError, subprocess.CalledProcessError, IndexError):
        driver = "unknown"
    return {"device": device.device_kind, "driver": driver, "jax": jax.__version__, "command": " ".join(sys.argv[1:])}


def main(arguments: Sequence[str] | None = None) -> int:
    """Returns 0, or 1 if an implementation was wrong or failed (rather than declined the case)."""
    parser = argparse.ArgumentParser(prog="python -m pallas_kernels.bench", description=__doc__)
    parser.add_argument("op", choices=OPS)
    parser.add_argument("--shapes", default="", help="names, with commas (default: all)")
    parser.add_argument("--implementations", default="", help="names, with commas (default: all of the operation)")
    parser.add_argument("--peer", type=pathlib.Path, help="JSON results of a peer's benchmark")
    parser.add_argument("--json", type=pathlib.Path, help="write the results there")
    parser.add_argument("--png", type=pathlib.Path, help="draw a bar chart there (needs matplotlib)")
    parser.add_argument("--sweep", action="store_true", help="try the operation's tile configurations")
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args(arguments)
    module = importlib.import_module(f"pallas_kernels.{args.op}.benchmark")
    names = [x for x in args.shapes.split(",") if x]
    if unknown := [x for x in names if x not in module.SHAPES]:
        parser.error(f"--shapes: expected names among {', '.join(module.SHAPES)}, got {', '.join(unknown)}")
    chosen = [x for x in args.implementations.split(",") if x] or list(module.IMPLEMENTATIONS)
    if unknown := [x for x in chosen if x not in module.IMPLEMENTATIONS]:
        parser.error(
            f"--implementations: expected names among {', '.join(module.IMPLEMENTATIONS)}, got {', '.join(unknown)}"
        )
    if jax.default_backend() != "gpu":
        parser.error(f"needs a GPU: JAX's default backend is {jax.default_backend()!r}, whose times would say nothing")
    results = json.loads(args.peer.read_text()) if args.peer else []
    about = environment()
    print(f"# {about['device']}, driver {about['driver']}, jax {about['jax']}", HEADER, sep="\n", flush=True)

    def clock(function: Callable[[Any], Any], sets: Sequence[Any]) -> float:
        return device_time_us(function, sets, args.repeats)

    records, peers = [], {}
    for case in module.cases(names):
        peers[case.name] = peer_us(results, case)
        want = case.function("reference")(case.sets[0])
        for implementation in chosen:
            swept = args.sweep and implementation == "mosaic"
            for options in list(module.sweep(case)) if swept else [{}]:
                records.append(measure(args.op, case, implementation, options, want, clock))
                print(line(records[-1], peers[case.name]), flush=True)
    if args.json:
        rows = [{**dataclasses.asdict(r), "peer_us": peers[r.shape]} for r in records]
        args.json.write_text(json.dumps({"environment": about, "results": rows}, indent=1) + "\n")
    if args.png:
        chart(records, peers, args.png, f"{args.op} · {about['device']} · jax {about['jax']}")
    return int(any(r.us is None and not r.reason.startswith("NotImplementedError") for r in records))


if __name__ == "__main__":
    sys.exit(main())
