"""Makes the vectors of fleets: `python -m kvproto_conformance.fleet_vectors` writes spec/v1/vectors/plan/fleets.json.

Every way to divide three models over source ranks, to every way over sink ranks, with layers dealt and with few sources.
Descriptions have names, because many cases share one; what is expected comes from the suite's own planner.
"""

from __future__ import annotations

from typing import Any

from kvproto.planning.cache import Cache
from kvproto.planning.layout import Parallel, lay_out
from kvproto.wire import to_json
from kvproto.wire.enums import DType
from kvproto_conformance.checking import beyond
from kvproto_conformance.planner import plan
from kvproto_conformance.suites import MADE, text

FILE = MADE / "plan/fleets.json"

MODELS: dict[str, list[Cache]] = {
    "mla with a draft of one layer": [
        Cache.mla("target", 8, latent=512, rope=64, page=64), Cache.mla("draft", 1, latent=512, rope=64, page=64, model=1),
        Cache.handoff("first token", {"token": (DType.U32, 4)}),
    ],
    "gqa with a gqa draft": [
        Cache.gqa("target", 8, kv_heads=2, head_dim=128, page=16), Cache.gqa("draft", 2, kv_heads=4, head_dim=64, page=16, model=1),
    ],
    "mla with an indexer and a gqa draft": [
        Cache.mla("target", 7, latent=512, rope=64, page=64), Cache.indexer("index", 7, head_dim=128, page=64, scale_block=None),
        Cache.gqa("draft", 1, kv_heads=2, head_dim=64, page=64, model=1),
    ],
}  # fmt: skip
SOURCES = {
    "tp8": Parallel(tp=8), "tp3": Parallel(tp=3), "tp4 pp2": Parallel(tp=4, pp=2), "tp4 pp2 virtual2": Parallel(tp=4, pp=2, virtual=2),
    "tp2 pp4": Parallel(tp=2, pp=4), "tp3 pp2 virtual3": Parallel(tp=3, pp=2, virtual=3), "tp2 cp4": Parallel(tp=2, cp=4, interleave=64),
    "tp4 dcp2": Parallel(tp=4, dcp=2, interleave=64),
}  # fmt: skip
SINKS = {
    "tp1": Parallel(), "tp2": Parallel(tp=2), "tp4 dcp2": Parallel(tp=4, dcp=2, interleave=64), "tp3": Parallel(tp=3),
    "tp2 pp2 virtual2": Parallel(tp=2, pp=2, virtual=2),
}  # fmt: skip


def made() -> str:
    """The text of the file."""
    geometries: dict[str, Any] = {}
    rows = []
    for model, caches in MODELS.items():
        for sides, replicas in ((SOURCES, False), (SINKS, True)):
            for n, (name, parallel) in enumerate(sides.items()):
                key = f"{model}, {'to' if replicas else 'from'} {name}"
                geometries[key] = to_json(lay_out(caches, parallel, replica=3 * n * replicas))
        for source in SOURCES:
            for sink in SINKS:
                sides_ = {"source": f"{model}, from {source}", "sink": f"{model}, to {sink}"}
                for features, clause, note in (
                    ([], "KVP-PLAN-TURN", "units dealt out in turn"),
                    (["FEW_SOURCES"], "KVP-PLAN-FEW", "units in as few runs as can be"),
                ):
                    found = plan(geometries[sides_["source"]], geometries[sides_["sink"]], features)
                    expected = {key: found[key] for key in ("plan", "required", "cold")}
                    id_ = f"{model}, {source} to {sink}{', few' * bool(features)}"
                    needs = beyond(*(geometries[name] for name in sides_.values()))
                    given = {"id": id_, "clause": clause, **sides_, "features": features}
                    rows.append({**given, **needs, "expected": expected, "note": note})
    return text("plan/fleets", rows, geometries=geometries)


if __name__ == "__main__":
    FILE.write_text(made())
