"""The driver for live engines: the suite plays the peer, over ZeroMQ, with its own memory and bytes."""

from kvproto_conformance.live import scenarios  # noqa: F401 - makes them known
from kvproto_conformance.live.running import Result, lacks, list_scenarios, run
from kvproto_conformance.live.scenario import Check, Scenario

__all__ = ["Check", "Result", "Scenario", "lacks", "list_scenarios", "run"]
