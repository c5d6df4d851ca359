"""Prometheus metrics of Sources and Sinks, by the names of spec/v1/metrics.md; `pip install 'kvproto[metrics]'`.

    sink = Sink("decode", pool, sources, Options(metrics=True))
    prometheus_client.REGISTRY.register(Collector(sink))

An engine that shows its metrics in another process sends the plain values of `Sink.metrics()` there, to a Collector.
"""

from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector as _Collector

from kvproto.observability.counts import MetricSample
from kvproto.observability.names import BASE, BUCKETS, METRICS
from kvproto.rank.base import EngineRank

__all__ = ["Collector"]

_Family = CounterMetricFamily | GaugeMetricFamily | HistogramMetricFamily
_ENDS = [*map(str, BUCKETS), "+Inf"]


class Collector(_Collector):
    """A custom collector of a `prometheus_client` registry; register one for all Sources and Sinks of a registry."""

    def __init__(self, *shown: EngineRank | Callable[[], Iterable[MetricSample]]) -> None:
        """`shown` are Sources and Sinks with Options(metrics=True), or functions that return what `metrics` does."""
        self._shown = [source.metrics if isinstance(source, EngineRank) else source for source in shown]

    def describe(self) -> Iterable[Metric]:
        """The metrics without their values, so that registering collects none."""
        return self._families().values()

    def collect(self) -> Iterator[Metric]:
        """The metrics with their values."""
        families = self._families()
        for sample in [sample for ask in self._shown for sample in ask()]:
            name, value = sample["name"], sample["value"]
            if (family := families.get(name)) is None:  # a metric of a later version
                continue
            labels = [sample["labels"][label] for label in (*BASE, *METRICS[name][1])]
            if isinstance(value, list):
                if isinstance(family, HistogramMetricFamily):
                    *counts, total = value
                    family.add_metric(labels, list(zip(_ENDS, accumulate(counts), strict=True)), total)
            elif isinstance(family, CounterMetricFamily | GaugeMetricFamily):
                family.add_metric(labels, value)
        yield from families.values()

    def _families(self) -> dict[str, _Family]:
        return {
            name: _FAMILIES[type_](name, doc, labels=(*BASE, *labels)) for name, (type_, labels, doc) in METRICS.items()
        }


_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}
