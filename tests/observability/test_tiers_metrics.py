"""Metrics of pages that are kept, read back as Prometheus would: they say what was found, what moved, and why hits are short."""

import shutil
import time
from pathlib import Path

import pytest

from kvproto import Cache, DType, Pool, Tiers, lay_out
from tools.specgen.registry import load

from .test_metrics import Shown, values

PAGE = 4
NAMES = {"weights.target": "w", "rope.target": "r", "dtype.target": "U8"}
LENGTHS = {"kv": 2 * 2 * 8 * PAGE, "draft": 2 * 1 * 8 * PAGE}
"""Bytes of a page of each component: K and V of its layers, a head of 8 bytes."""


def tiers_over(folder: Path, pages: int = 8, host: int = 16) -> Tiers:
    geometry = lay_out(
        [
            Cache.gqa("kv", 2, kv_heads=1, head_dim=8, page=PAGE, dtype=DType.U8),
            Cache.gqa("draft", 1, kv_heads=1, head_dim=8, page=PAGE, dtype=DType.U8, model=1),
        ]
    )
    return Tiers(Pool.allocate(geometry, pages), NAMES, page=PAGE, host=host, storage=folder)


def turn(tiers: Tiers, who: int, pages: int = 4) -> int:
    """A prompt of whole pages, looked for in storage too, and kept; how many of its pages were found."""
    chain = tiers.chain([who] * pages * PAGE + [0])
    fetch = tiers.fetch(chain, deadline=float("inf"))
    while not fetch.over(time.monotonic()):
        tiers.step()
    fetch.take()
    lease = tiers.open(chain, room=pages)
    assert lease is not None
    tiers.step()
    found = lease.pages
    lease.leave(rows=pages * PAGE)
    tiers.step()
    tiers.drain()
    return found


def of(shown: Shown, name: str) -> dict[tuple[str, ...], float]:
    return {
        labels: value for (metric, role, *rest), value in shown.items() if metric == name and (labels := tuple(rest))
    }


def test_what_is_found_and_what_moves(tmp_path: Path) -> None:
    """KVP-SEE-NAMES: four conversations of 4 pages, of which the device holds two and the host all."""
    tiers = tiers_over(tmp_path)
    found = [turn(tiers, who) for who in (1, 2, 3, 4, 1, 4)]
    assert found == [0, 0, 0, 0, 4, 4]
    shown = values(lambda: tiers.metrics("prefill"))
    pages = of(shown, "kvproto_tier_pages_total")
    assert [pages[what,] for what in ("new", "host", "device", "stored")] == [16, 4, 4, 16]
    assert not any(pages[what,] for what in ("not_kept", "not_stored", "damaged", "evicted"))
    for way, count in (("to_host", 16), ("from_host", 4), ("to_storage", 16)):
        for group, length in LENGTHS.items():
            assert shown["kvproto_tier_bytes_total", "tiers", group, way] == count * length
    slots = of(shown, "kvproto_tier_slots")
    assert (slots["readable", "device"], slots["free", "device"], slots["readable", "host"]) == (8, 0, 16)
    held = of(shown, "kvproto_tier_held_pages")
    assert held == {(g, t): {"device": 8, "host": 16}[t] for g in LENGTHS for t in ("device", "host")}
    assert not any(of(shown, "kvproto_tier_failures_total").values())
    registry = load()
    for name, role, *_ in shown:
        assert role in registry["metric"][name]["roles"]
    assert {name for name, *_ in shown} == {n for n, row in registry["metric"].items() if "tiers" in row["roles"]}
    tiers.close()


@pytest.mark.parametrize(("kind", "what"), [("o", "damaged"), ("m", "missed")])
def test_why_a_hit_is_short(tmp_path: Path, kind: str, what: str) -> None:
    """A bit of the last page of a prompt is flipped in storage, in its objects or its manifest: an engine that begins finds one page less, and metrics say why."""
    first = tiers_over(tmp_path / "whole")
    turn(first, 1)
    first.close()
    shutil.copytree(tmp_path / "whole", tmp_path / "harmed")
    id = first.chain([1] * 4 * PAGE + [0]).ids(first.device.layout.form)[3].hex()
    paths = [path for path in (tmp_path / "harmed" / kind).rglob("*") if path.is_file() and id in path.name]
    assert paths
    for path in paths:
        data = bytearray(path.read_bytes())
        data[len(data) // 2] ^= 1
        path.write_bytes(data)
    for folder, pages in (("whole", 4), ("harmed", 3)):
        second = tiers_over(tmp_path / folder)
        assert turn(second, 1) == pages
        counts = of(values(lambda second=second: second.metrics("prefill")), "kvproto_tier_pages_total")
        assert counts["fetched",] == pages
        assert bool(counts[what,]) == (folder == "harmed")
        second.close()
