"""The numbers of this room are those that the registry publishes, to the last one: no case and no peer sees some of them."""

import json

from kvproto.planning import limits
from tools.specgen.registry import SPEC


def test_limits_are_those_of_the_registry() -> None:
    published = json.loads((SPEC / "registry.json").read_text())["limit"].items()
    seconds = {"ms": 1000}
    wanted = {n.upper(): row["value"] / seconds.get(row["unit"], 1) for n, row in published if row["scope"] == "plan"}
    assert {name: value for name, value in vars(limits).items() if name.isupper()} == wanted
