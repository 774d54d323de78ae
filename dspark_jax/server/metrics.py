"""``/metrics``: the engine's counters in Prometheus' text format."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

_GAUGES = {
    "running": "Requests that hold a slot",
    "waiting": "Requests that wait for a slot or for pages",
    "in_flight": "Requests accepted and not ended, those included that the engine has not seen yet",
    "free_pages": "Cache blocks of 256 tokens that can be handed out",
    "total_pages": "Cache blocks of 256 tokens in all",
    "free_window_pages": "Window pages of 64 tokens that can be handed out",
    "live_device_bytes": "Bytes of parameters and state held on the device",
    "compiled_programs": "Compiled step programs: the frozen set of shapes",
    "prefix_cached_blocks": "Blocks that a prompt can find in the prefix cache",
}
_COUNTERS = {
    "generated_tokens": "Tokens delivered",
    "verified_rounds": "Verifications of one request's drafts",
    "preemptions": "Requests that gave up their pages and were computed again",
    "compiles_after_ready": "Compilations after the start: anything but 0 is a bug",
    "prefix_query_tokens": "Tokens of admitted prompts, looked up in the prefix cache",
    "prefix_hit_tokens": "Tokens of admitted prompts that the prefix cache had",
    "prefix_hits": "Admissions that took something from the prefix cache",
    "prefix_evictions": "Blocks that the prefix cache gave up for others",
}
_ACCEPTED = "accepted_at_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


class _Counters(Collector):
    def __init__(self, values: Mapping[str, float]):
        self._values = values

    def collect(self) -> Iterator[Metric]:
        for names, family in ((_GAUGES, GaugeMetricFamily), (_COUNTERS, CounterMetricFamily)):
            for name, help_text in names.items():
                if name in self._values:  # an engine reports what it has
                    yield family(f"dspark_jax_{name}", help_text, value=self._values[name])
        accepted = CounterMetricFamily(
            "dspark_jax_accepted_rounds", "Verifications that accepted at least this many drafts", labels=["drafts"]
        )
        for name, value in self._values.items():
            if name.startswith(_ACCEPTED):
                accepted.add_metric([name.removeprefix(_ACCEPTED)], value)
        if accepted.samples:
            yield accepted


def render(counters: Mapping[str, float]) -> bytes:
    """The counters of ``AsyncEngine.counters`` as an exposition, every name with the prefix ``dspark_jax_`` (and
    ``_total`` behind what only grows)."""
    registry = CollectorRegistry()
    registry.register(_Counters(counters))
    return generate_latest(registry)
