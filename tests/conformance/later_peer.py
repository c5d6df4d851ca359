"""The suite's peers of a later minor that say all that its version has added, with its registry in KVPROTO_REGISTRY.

`later_peer.py --role source|sink --id LIVE-n -- ADAPTER`, as `python -m kvproto_conformance.live`. Each message and struct that they
write has its new field, their Geometry too.
"""

import sys
from typing import Any

from kvproto_conformance.codec import write_frame, write_struct
from kvproto_conformance.codec.facts import MESSAGES, STRUCTS, Layout, Type
from kvproto_conformance.live import peer, world
from kvproto_conformance.live.__main__ import main

FILLED: dict[str, Any] = {"uint": "7", "str": "later", "bytes": "01", "bool": True}


def filled(layout: Layout, fields: dict[str, Any]) -> dict[str, Any]:
    """The same with every field that its version has added and that may be ignored."""
    known = {name: below(layout.names[name].type, value) for name, value in fields.items() if name in layout.names}
    return (
        fields | known | {field.name: new(field.type) for field in layout.fields.values() if field.name == "x_made_up"}
    )


def below(type_: Type, value: Any) -> Any:
    if type_.kind == "struct" and isinstance(value, dict):
        return filled(STRUCTS[type_.name], value)
    return [below(type_.item, each) for each in value] if type_.kind == "list" else value


def new(type_: Type) -> Any:
    """A value of a field that was added."""
    if type_.kind in ("list", "array"):
        return [new(type_.item)]
    return {"number": "1", "name": "later"} if type_.kind == "struct" else FILLED[type_.kind]


def filled_frame(message: str, fields: dict[str, Any], minor: int = 0) -> bytes:
    return write_frame(message, filled(MESSAGES[message], fields), minor)


def filled_struct(name: str, fields: dict[str, Any]) -> bytes:
    return write_struct(name, filled(STRUCTS[name], fields) if name == "Geometry" else fields)


peer.write_frame = filled_frame  # type: ignore[attr-defined]
world.write_struct = filled_struct  # type: ignore[attr-defined]
sys.exit(main())
