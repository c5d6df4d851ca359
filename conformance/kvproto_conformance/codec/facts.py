"""The facts of spec/v1/registry.json, as this codec looks them up."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

__all__ = ["BODIES", "LIMIT", "MESSAGES", "Field", "enum_of", "fields_of", "is_open", "join", "major_of", "range_of"]

_HERE = Path(__file__).resolve()
_REPOSITORY = _HERE.parents[3] / "spec/v1/registry.json"
_FACTS: dict[str, Any] = json.loads(
    (_REPOSITORY if _REPOSITORY.is_file() else _HERE.parent / "registry.json").read_text()
)

Field = dict[str, Any]
LIMIT: dict[str, int] = {name: row["value"] for name, row in _FACTS["limit"].items()}
BODIES: dict[str, dict[str, Any]] = {**_FACTS["struct"], **_FACTS["message"]}
MESSAGES: dict[int, str] = {row["id"]: name for name, row in _FACTS["message"].items()}
_TOP = {"u8": 2**8 - 1, "u16": 2**16 - 1, "u32": 2**32 - 1, "u64": 2**64 - 1}
_SIZE_LIMIT = {"str": "max_string", "bytes": "max_bytes", "list": "max_list", "array": "max_array"}


def fields_of(name: str) -> list[Field]:
    """Fields of a message or struct, by id."""
    found: list[Field] = BODIES[name]["field"]
    return found


def major_of(name: str) -> int:
    """The major version that a message travels as."""
    return 0 if BODIES[name]["frozen"] else int(_FACTS["protocol"]["major"])


def minor_of(name: str) -> int:
    """The minor version that this writer sends with it."""
    return 0 if BODIES[name]["frozen"] else int(_FACTS["protocol"]["minor"])


def enum_of(name: str) -> dict[str, int]:
    """Names and values of an enum."""
    if name == "ErrorCode":
        return {error: row["code"] for error, row in _FACTS["error"].items()}
    values: dict[str, int] = _FACTS["enum"][name]["values"]
    return values


def is_open(name: str) -> bool:
    """Whether unknown values of the enum are kept."""
    return name == "ErrorCode" or bool(_FACTS["enum"][name]["open"])


def range_of(field: Field) -> tuple[int, int]:
    """Least and greatest value, length or number of elements of a field."""
    type_ = field["type"]
    if "length" in field:
        return field["length"], field["length"]
    top = _TOP.get(type_) or LIMIT.get(_SIZE_LIMIT.get(type_.partition("<")[0], ""), 0)
    return field.get("min", 0), field.get("max", top)


def join(path: str, step: str | int) -> str:
    """A path one step deeper: a name, or an index."""
    if isinstance(step, int):
        return f"{path}[{step}]"
    return f"{path}.{step}" if path else step
