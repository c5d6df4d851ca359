"""The driver for live engines: the suite is the peer, over ZeroMQ, with memory and bytes of its own."""

from kvproto_conformance.live import scenarios  # noqa: F401 - makes them known
from kvproto_conformance.live.running import Result, lacks, list_scenarios, run
from kvproto_conformance.live.scenario import Check, Scenario

__all__ = ["Check", "Result", "Scenario", "lacks", "list_scenarios", "run"]
