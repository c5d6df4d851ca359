"""Counts of events by the metrics of spec/v1/metrics.md, as plain numbers, so that counting costs next to nothing."""

from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypedDict

from kvproto import events as e
from kvproto.errors import KvprotoError
from kvproto.observability.names import BUCKETS, METRICS


class MetricSample(TypedDict):
    """One series of one metric, in plain values."""

    name: str
    labels: dict[str, str]
    value: float | list[float]
    """A number; for a histogram, the count of each bucket, the count above the last, and the sum."""


def sample(base: Mapping[str, str], name: str, labels: tuple[str, ...], value: float | list[float]) -> MetricSample:
    """A sample with the `base` labels of every metric, and `labels` as the values of the metric's other labels."""
    return {"name": name, "labels": {**base, **dict(zip(METRICS[name][1], labels, strict=True))}, "value": value}


class Counts:
    """The counts of a Source or Sink since it was opened; to be used under its node's lock."""

    def __init__(self, now: Callable[[], float]) -> None:
        """`now` is the clock of the requests' times."""
        self._now = now
        self._totals: dict[tuple[str, ...], float] = {("kvproto_bytes_total",): 0, ("kvproto_suspicions_total",): 0}
        """Totals by metric and label values, which are codes and words of the registry, and therefore few."""
        self._phases: dict[str, list[float]] = {}

    def hear(self, event: e.Event) -> None:
        if (count := _COUNT.get(type(event))) is not None:
            count(self, event)

    def samples(self, base: Mapping[str, str]) -> Iterator[MetricSample]:
        """Samples of all counts, with the labels in `base`."""
        for (name, *labels), value in self._totals.items():
            yield sample(base, name, tuple(labels), value)
        for phase, counted in self._phases.items():
            yield sample(base, "kvproto_phase_seconds", (phase,), list(counted))

    def _add(self, *series: str, by: float = 1) -> None:
        self._totals[series] = self._totals.get(series, 0) + by

    def _spent(self, phase: str, seconds: float) -> None:
        counted = self._phases.get(phase)
        if counted is None:
            counted = self._phases[phase] = [0] * (len(BUCKETS) + 2)
        counted[bisect_left(BUCKETS, seconds)] += 1
        counted[-1] += seconds

    def _arrived(self, event: e.Arrived) -> None:
        self._add("kvproto_transfers_total", "arrived", "")
        self._add("kvproto_bytes_total", by=sum(event.bytes.values()))
        self._spent("transfer", event.seconds)
        self._spent("fetch", self._now() - event.fetch.began)

    def _sent(self, event: e.Sent) -> None:
        self._add("kvproto_transfers_total", "sent", "")
        self._add("kvproto_bytes_total", by=sum(event.bytes.values()))
        self._spent("copy", event.seconds)

    def _freed(self, event: e.Freed) -> None:
        self._add("kvproto_requests_total", "freed")
        computed = event.request.computed_at
        if computed is not None:
            self._spent("prefill", computed - event.request.began)
            self._spent("hold", self._now() - computed)

    def _undelivered(self, event: e.Undelivered) -> None:
        self._add("kvproto_requests_total", "undelivered")
        for error in event.lost.values():
            self._add("kvproto_transfers_total", "lost", error.code.name)

    def _refused(self, by: str, error: KvprotoError) -> None:
        self._add("kvproto_refusals_total", by, error.code.name)


_COUNT: dict[type, Callable[[Counts, Any], None]] = {
    e.Arrived: Counts._arrived,
    e.Lost: lambda counts, event: counts._add("kvproto_transfers_total", "lost", event.error.code.name),
    e.Sent: Counts._sent,
    e.Freed: Counts._freed,
    e.Undelivered: Counts._undelivered,
    e.Expired: lambda counts, event: counts._add("kvproto_requests_total", "expired"),
    e.Refused: lambda counts, event: counts._refused("us" if event.by_us else "peer", event.error),
    e.ProtocolError: lambda counts, event: counts._refused("frame", event.error),
    e.Suspected: lambda counts, event: counts._add("kvproto_suspicions_total"),
}
