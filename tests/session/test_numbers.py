"""The numbers of this room are those that the registry publishes, to the last one: no case and no peer sees some of them."""

import json

from kvproto.session import limits
from kvproto.wire.tables import DELIVERY
from tools.specgen.registry import SPEC


def test_limits_are_those_of_the_registry() -> None:
    published = json.loads((SPEC / "registry.json").read_text())["limit"].items()
    seconds = {"ms": 1000}
    wanted = {
        n.upper(): row["value"] / seconds.get(row["unit"], 1) for n, row in published if row["scope"] == "session"
    }
    assert {name: value for name, value in vars(limits).items() if name.isupper()} == wanted


def test_messages_are_delivered_as_the_registry_says() -> None:
    """KVP-SES-RESEND: requests come again until they are answered, notices never."""
    published = json.loads((SPEC / "registry.json").read_text())["message"]
    assert {name: message["delivery"] for name, message in published.items()} == DELIVERY
