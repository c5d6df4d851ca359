"""Shared parts of the tiers of two engines: settings, and the names of pages (spec/v1/tiers.md)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs

from kvproto import DType, Geometry, LocalError
from kvproto.errors import ErrorCode
from kvproto_engines.settings import refuse

__all__ = ["ONLY_TOKENS", "Tiered", "names_of", "read"]

_WORDS = {DType.F32: "float32", DType.F16: "float16", DType.BF16: "bfloat16"}
"""Element types as configs of models call them; others have the names of the registry, in lower case."""
ONLY_TOKENS = "layers whose pages hold all tokens, in one block table"
"""The layers whose pages are kept."""


@attrs.frozen(kw_only=True)
class Tiered:
    """The settings of pages in storage, for any engine.

    Fields:
        storage: A folder, "packs:FOLDER", or the URL of an object store.
        most: Bytes that this engine keeps there; 0: without limit.
        durable: Whether pages in files survive a loss of power once they are stored.
        weights: Names the weights, where engines' folders do not.
        seal: A file of keys with which pages are sealed in storage, a line of 64 hex digits each.
    """

    storage: str
    most: int = 0
    durable: bool = False
    weights: str | None = None
    seal: str | None = None


def read(where: str, cls: type[Any], given: Any, sizes: tuple[str, ...], seconds: tuple[str, ...] = ()) -> Any:
    """Settings of a class, each looked at; raises LocalError naming the one that is unknown, missing or wrong.

    `sizes` are the names of whole numbers from 0 on, and `seconds` those of numbers from 0 on.
    """
    fields = {field.name: field.default for field in attrs.fields(cls)}
    if not isinstance(given, Mapping) or (unknown := sorted(map(str, given.keys() - fields.keys()))):
        found = repr(unknown[0]) if isinstance(given, Mapping) else type(given).__name__
        raise refuse(where, "", f"settings of {list(fields)}", found, "correct its name")
    if not isinstance(given.get("storage"), str) or not given["storage"]:
        advice = 'a folder, "packs:FOLDER", or the URL of an object store'
        raise refuse(where, "storage", "where pages are stored", str(given.get("storage")), advice)
    for name, kinds, mine in (
        *((name, int, "a whole number from 0 on") for name in sizes),
        *((name, (int, float), "seconds from 0 on") for name in seconds),
    ):
        value = given.get(name, 0)
        if isinstance(value, bool) or not isinstance(value, kinds) or value < 0:  # type: ignore[arg-type]
            raise refuse(where, name, mine, repr(value), f"leave it out for {fields[name]}")
    for name, kind in (("durable", bool), ("weights", str), ("seal", str)):
        if given.get(name) is not None and not isinstance(given[name], kind):
            raise refuse(where, name, f"a {kind.__name__}", repr(given[name]), "leave it out")
    return cls(**given)


def names_of(geometry: Geometry) -> dict[str, str]:
    """Names of what computes an engine's pages: its facts, and the element types of the target and its draft.

    Raises LocalError where nothing names the weights.
    """
    names = {fact.name: fact.value for fact in geometry.facts}
    for of, number in (("target", 0), ("draft", 1)):
        parts = [part for group in geometry.groups if group.model == number for part in group.parts]
        if not parts:
            continue
        if f"weights.{of}" not in names:
            raise LocalError(ErrorCode.IDENTITY_MISMATCH, f"weights.{of}", "a name", "none", "name them by `weights`")
        kinds = {DType(part.dtype) for part in parts}
        names[f"dtype.{of}"] = ",".join(sorted(_WORDS.get(kind, kind.name.lower()) for kind in kinds))
    return names
