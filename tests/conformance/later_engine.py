"""An engine of a later minor that says all that its version has added: `later_engine.py source|sink`, with that version on PYTHONPATH.

Each message and struct that it sends has its new field, its Geometry too; the version of the session is an older one.
"""

import sys
from pathlib import Path
from typing import Any

import attrs

import kvproto
from kvproto.wire import codec, messages, tables

FILLED: dict[str, Any] = {
    "u64": 7, "str": "later", "bytes": b"\1", "bool": True, "array<u32>": (1, 2), "list<str>": ("a",),
}  # fmt: skip
encode, encode_struct = codec.encode, codec.encode_struct


def filled(value: Any) -> Any:
    """The same with every field that its version has added and that may be ignored, apart from those of drafts."""
    more: dict[str, Any] = {}
    for _, name, type_, *_ in tables.FIELDS[type(value).__name__]:
        held = getattr(value, name)
        if name == "x_made_up":
            struct = messages.MadeUpStruct(number=1, name="later") if "struct:" in type_ else None
            more[name] = FILLED[type_] if struct is None else (struct,) if type_.startswith("list<") else struct
        elif type_.startswith("struct:") and held is not None:
            more[name] = filled(held)
        elif type_.startswith("list<struct:") and held is not None:
            more[name] = tuple(map(filled, held))
    return attrs.evolve(value, **more)


def filled_encode(message: Any, grease: Any = None, minor: int = tables.MINOR) -> bytes:
    return encode(filled(message), grease, minor)


def filled_struct(value: Any) -> bytes:
    return encode_struct(filled(value) if isinstance(value, messages.Geometry) else value)


for module in [module for name, module in sys.modules.items() if name.startswith("kvproto")]:
    for name, old, new in (("encode", encode, filled_encode), ("encode_struct", encode_struct, filled_struct)):
        if getattr(module, name, None) is old:
            setattr(module, name, new)

sys.path.insert(0, str(Path(kvproto.__file__).parents[1] / "conformance/testees"))
from toy_engine import serve  # noqa: E402

if sys.argv[1] == "source":
    from live_source import Prefill

    serve(Prefill())
else:
    from live_sink import Decode

    serve(Decode())
