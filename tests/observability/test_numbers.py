"""Metrics have the names, types and labels that the registry publishes."""

import json

from kvproto.observability.names import METRICS
from tools.specgen.registry import SPEC


def test_metrics_are_those_of_the_registry() -> None:
    published = json.loads((SPEC / "registry.json").read_text())["metric"]
    wanted = {name: (row["type"], tuple(row["labels"])) for name, row in published.items()}
    assert {name: row[:2] for name, row in METRICS.items()} == wanted
