"""The way in which the generated classes state their fields, and the rows that the codec and other tools read."""

from typing import Any

import attrs

Field = tuple[int, str, str, bool, int | None, int | None, int | None]
"""id, name, type, required, min, max (of a list or array: elements; of text and bytes: length), exact length"""


def row(
    id: int, type: str, min: int | None = None, max: int | None = None, length: int | None = None, unit: str = ""
) -> dict[str, Any]:
    """The metadata of an attribute: its row, apart from what attrs knows of it."""
    return {"id": id, "type": type, "min": min, "max": max, "length": length, "unit": unit}


def rows(cls: type[Any]) -> tuple[Field, ...]:
    """The rows of a message or struct, in the order of its attributes."""
    return tuple(
        (of["id"], field.name, of["type"], field.default is attrs.NOTHING, of["min"], of["max"], of["length"])
        for field, of in ((field, field.metadata) for field in attrs.fields(cls))
    )
