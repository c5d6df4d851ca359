"""The suite's own sink of Data: packed.md, inline, word by word. It shares no code with kvproto."""

from __future__ import annotations

from typing import Any


def taken(length: int, total: int, data: list[list[str]]) -> dict[str, Any]:
    """Bytes of these Data that are unpacked and counted, and the refusal that came first and ended the transfer."""
    unpacked = counted = 0
    refused: list[str] = []
    for n, (offset, size, last) in enumerate(data):
        at, end = int(offset), int(offset) + int(size)
        error = ""
        if counted + int(size) > total:
            error = "CREDIT data"
        elif refused:
            counted += int(size)
        else:
            counted += int(size)
            if at != unpacked or end > length:
                error = "OUT_OF_RANGE offset"
            elif (last == "true") != (end == length):
                error = "FIELD_CONFLICT last"
            else:
                unpacked = end
        if error and not refused:
            refused = [str(n), *error.split()]
    return {"unpacked": str(unpacked), "counted": str(counted), **({"refused": refused} if refused else {})}
