"""A fleet in words: what its messages state together, what they leave unsaid, and the Description that follows.

A Description is made from the words (words.toml) that messages state or the caller says, then held against every buffer
that the capture states: it is refused if a page has another size, so that a wrong word does not pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from kvproto.errors import LocalError, WireError, check_whole
from kvproto.planning.cache import BITS, Cache
from kvproto.planning.geometry import Geometry, Owns, lane_bytes, validate
from kvproto.planning.layout import Parallel, lay_out
from kvproto.wire.enums import DType, ErrorCode
from kvproto.wire.plain import refuse
from kvproto_captures.interpreter import Interpretation
from kvproto_captures.tables import EngineTable, words
from kvproto_catalog.config import MOST_LAYERS
from kvproto_catalog.engines import ENGINES, pools
from kvproto_catalog.models import Setup

__all__ = ["Fleet", "MissingWord"]

_MOST_RANKS = 1024
_MOST = {"tp": _MOST_RANKS, "pp": _MOST_RANKS, "cp": _MOST_RANKS, "dcp": _MOST_RANKS, "layers": MOST_LAYERS}
_LARGEST = 1 << 20
_NUMBERS = (*_MOST, "interleave", "page", "blocks_per_page", "kv_heads", "head_dim", "latent")
_PLACES = ("tp_rank", "pp_rank", "cp_rank", "dcp_rank")
_ENTRIES = ("entries", "entry_bytes", "entry_layers", "entry_names", "entry_groups")
_OF_RANK = (*_PLACES, *_ENTRIES, "state_bytes", "staging_bytes")
_PLAIN = (["k", "v"], ["latent"])


@attrs.frozen
class MissingWord:
    """A word that was neither stated nor said."""

    word: str
    doc: str
    say: str
    usual: int | None
    """The value that is assumed; None if a Description needs the word."""


@attrs.define
class Fleet:
    """The ranks of one side, in words."""

    messages: Sequence[Interpretation]
    shared: dict[str, Any] = attrs.field(factory=dict)
    """Words of the whole fleet."""
    where: dict[str, str] = attrs.field(factory=dict)
    """The path at which each was stated, or "always" or "said"."""
    ranks: dict[tuple[int, ...], dict[str, Any]] = attrs.field(factory=dict)
    """Words of each rank that registered, by pipeline, context and tensor-parallel rank."""

    @classmethod
    def of(cls, messages: Sequence[Interpretation], said: Mapping[str, str] | None = None) -> Fleet:
        """The words of messages, then those that are said; raises WireError or LocalError if they disagree."""
        fleet = cls(messages)
        for word, value in messages[0].engine.always.items():
            fleet.state(word, value, "always")
        ahead: dict[str, Any] = {}
        for message in messages:
            own: dict[str, Any] = {}
            for word, value, path in message.stated():
                if word not in _OF_RANK:
                    fleet.state(word, value, path)
                elif value or word not in own:
                    own[word] = value
            if message.whose == "next":
                ahead = own
            elif own:
                fleet.join({**ahead, **own}, message.path)
                ahead = {}
        for word, text in (said or {}).items():
            fleet.say(word, text)
        return fleet

    @property
    def engine(self) -> EngineTable:
        """The table of its engine."""
        return self.messages[0].engine

    @property
    def name(self) -> str:
        """Its engine and releases, such as "sglang 0.5.22 to 0.5.23"."""
        engine, releases = self.engine.name, self.messages[0].releases
        return f"{engine} {releases[0]}" + (f" to {releases[-1]}" if len(releases) > 1 else "")

    def state(self, word: str, value: Any, path: str) -> None:
        """Add a word of the whole fleet; raises WireError: OUT_OF_RANGE, or FIELD_CONFLICT if it had another value."""
        if word.endswith("dtype"):
            value = words()["dtype"].get(str(value).removeprefix("torch."))
            if value is None:  # such as auto: what the model has
                return
        if word in _NUMBERS and (value < 1 or value > _MOST.get(word, _LARGEST)):
            raise refuse(ErrorCode.OUT_OF_RANGE, path, f"1 to {_MOST.get(word, _LARGEST)}", value)
        if self.shared.setdefault(word, value) != value:
            before = f"{word} {self.shared[word]} ({self.where[word]})"
            raise refuse(ErrorCode.FIELD_CONFLICT, path, before, value, "put one fleet into one file")
        self.where.setdefault(word, path)

    def say(self, word: str, text: str) -> None:
        """Add a word that the caller says; raises LocalError for one that cannot be said."""
        sayable = [w for w, row in words()["word"].items() if "say" in row]
        if word not in sayable:
            raise LocalError(ErrorCode.OUT_OF_RANGE, "say", f"one of {', '.join(sayable)}", word)
        value: Any = text
        if word in _NUMBERS:
            value = check_whole(f"say {word}", int(text) if text.isdecimal() and len(text) < 10 else text, 1)
        elif text not in words()["dtype"]:
            raise LocalError(ErrorCode.OUT_OF_RANGE, f"say {word}", ", ".join(words()["dtype"]), text)
        try:
            self.state(word, value, "said")
        except WireError as error:
            raise LocalError(error.code, f"say {word}", error.mine, error.yours, "the capture says otherwise") from None

    def join(self, rank: dict[str, Any], path: str) -> None:
        """Add the words of a rank; raises WireError if it had other sizes when it registered before."""
        for word in ("tp_rank", "pp_rank", "cp_rank"):
            size = self.shared.get(word[:2], _MOST_RANKS)
            if word in rank and not 0 <= rank[word] < size:
                raise refuse(ErrorCode.OUT_OF_RANGE, f"{path}.{word}", f"below {word[:2]} {size}", rank[word])
        key = tuple(rank.get(word, 0) for word in ("pp_rank", "cp_rank", "tp_rank"))
        if _shape(self.ranks.setdefault(key, rank)) != _shape(rank):
            at = f"rank {'.'.join(map(str, key))} as before"
            raise refuse(ErrorCode.FIELD_CONFLICT, path, at, "other sizes", "one file for each fleet")

    def missing(self, config: bool = False) -> list[MissingWord]:
        """The unsaid words without which there is no Description; `config` says whether there is a config.json too."""
        return [word for word in self.unsaid(config) if word.usual is None]

    def unsaid(self, config: bool = False) -> list[MissingWord]:
        """All unsaid words: first those of `missing`, then those for which the usual value is assumed."""
        have = self.known()
        unsaid = []
        for word, row in words()["word"].items():
            if word in have or (word == "interleave" and have.get("cp", 1) == have.get("dcp", 1) == 1):
                continue
            if (config and row.get("config")) or ("latent" in have and word in ("kv_heads", "head_dim")):
                continue
            if row.get("need") or ("usual" in row and "say" in row):
                say = row["say"] + ", or --config" * ("config" in row)
                unsaid.append(MissingWord(word, row["doc"], say, row.get("usual")))
        return sorted(unsaid, key=lambda word: word.usual is not None)

    def known(self) -> dict[str, Any]:
        """Words of the fleet, with what follows from the sizes of its buffers."""
        have = dict(self.shared)
        if "model_dtype" in have:
            have.setdefault("dtype", have["model_dtype"])
        joint = self.engine.entries == "joint"
        buffers = len(self._first("entries") or ())
        if buffers and have.get("pp", 1) == 1:
            per_layer = 1 if joint or "latent" in have else 2
            if "layers" not in have and ("latent" in have or "kv_heads" in have or joint) and buffers % per_layer == 0:
                have["layers"] = buffers // per_layer
        sizes = self._first("entry_bytes") or 0
        size: int = sizes[0] if isinstance(sizes, list) else sizes
        if size and "head_dim" not in have and {"page", "dtype", "kv_heads", "tp"} <= have.keys():
            tokens = have["page"] * max(1, have["kv_heads"] * have.get("dcp", 1) // have["tp"])
            elements, rest = divmod(size * 8, tokens * (2 if joint else 1) * BITS[DType[have["dtype"]]])
            if elements and not rest:
                have["head_dim"] = elements
        if "page" in have:
            have["page"] *= have.get("blocks_per_page", 1)
        return have

    def _first(self, word: str) -> Any:
        """The word of the first rank that states it, or None."""
        return next((rank[word] for rank in self.ranks.values() if rank.get(word)), None)

    def describe(
        self,
        config: Mapping[str, Any] | None = None,
        drafts: Sequence[Mapping[str, Any]] = (),
        facts: Mapping[str, str] | None = None,
    ) -> Geometry:
        """The fleet's Description; raises LocalError for a missing word, WireError if a buffer has another size."""
        have = self.known()
        for word in self.missing(config is not None):
            advice = f"--say {word.word}=...: {word.say}"
            raise LocalError(ErrorCode.MISSING_FIELD, word.word, word.doc, "unsaid", advice)
        sizes = {word: have.get(word, 1) for word in ("tp", "pp", "cp", "dcp", "interleave")}
        if sizes["tp"] * sizes["pp"] * sizes["cp"] > _MOST_RANKS:
            raise LocalError(ErrorCode.TOO_LARGE, "ranks", f"at most {_MOST_RANKS}", str(sizes))
        page, dtype = have["page"], DType[have["dtype"]]
        if config is not None:
            name = self.engine.name
            kinds = {row.element: kind for kind, row in ENGINES[name].dtypes.items() if row.element and not row.scaled}
            kv_dtype, computed = (kinds[dtype], None) if dtype in kinds else ("auto", dtype)
            setup = Setup(Parallel(**sizes), page=page, kv_dtype=kv_dtype, dtype=computed)
            geometry = pools(name, config, drafts, setup, facts=facts).geometry
        else:
            geometry = lay_out([self._cache(have, page, dtype)], Parallel(**sizes), facts=facts)
        validate(geometry)
        self._hold_words(geometry, "config.json" if config is not None else "the other words")
        for rank in self.ranks.values():
            self._hold(rank, geometry, sizes)
        return geometry

    def _hold_words(self, geometry: Geometry, basis: str) -> None:
        """Refuse a word that the Description contradicts, or one that was said and has no effect on it."""
        for word, sizes in _sizes(geometry).items():
            value, where = self.shared.get(word), self.where.get(word, "")
            path = f"say {word}" if where == "said" else where
            if value is not None and sizes and value not in sizes:
                wanted = f"{' or '.join(map(str, sorted(sizes)))}, by {basis}"
                raise LocalError(ErrorCode.FIELD_CONFLICT, path, wanted, str(value), "one of the two is wrong")
            if where == "said" and not sizes:
                wanted = f"words with an effect: by {basis} no cache has a {word}"
                raise LocalError(ErrorCode.OUT_OF_RANGE, path, wanted, str(value), "leave it out")

    def _cache(self, have: Mapping[str, Any], page: int, dtype: DType) -> Cache:
        ids = self._first("entry_layers")
        layers = list(dict.fromkeys(ids)) if ids else range(have["layers"])
        if len(layers) > _MOST["layers"]:
            raise LocalError(ErrorCode.TOO_LARGE, "layers", f"at most {_MOST['layers']}", str(len(layers)))
        if "latent" in have:
            return Cache.mla("target", layers, latent=have["latent"], rope=0, page=page, dtype=dtype)
        return Cache.gqa("target", layers, kv_heads=have["kv_heads"], head_dim=have["head_dim"], page=page, dtype=dtype)

    def _hold(self, rank: Mapping[str, Any], geometry: Geometry, sizes: Mapping[str, int]) -> None:
        """Refuse a Description whose pages are not as large as those of a rank that registered."""
        stated = rank.get("entry_bytes")
        if not stated or not rank.get("entries"):
            return
        stage, across = rank.get("pp_rank", 0) * sizes["cp"] + rank.get("cp_rank", 0), rank.get("tp_rank", 0)
        number = stage * sizes["tp"] + across
        at = f"ranks[{number}].entries"
        advice = "what was said is not what this engine runs: check page, dtype, heads, layers and drafts"
        if number >= len(geometry.ranks):
            raise refuse(ErrorCode.BAD_GEOMETRY, at, f"{len(geometry.ranks)} ranks", f"rank {number}", advice)
        expected = self._buffers(geometry, geometry.ranks[number].owns)
        if expected is None:
            return
        if len(expected) != len(rank["entries"]):
            raise refuse(ErrorCode.BAD_GEOMETRY, at, f"{len(expected)} buffers", len(rank["entries"]), advice)
        blocks = self.shared.get("blocks_per_page", 1)
        for i, size in enumerate(stated if isinstance(stated, list) else [stated]):
            if i < len(expected) and size * blocks != expected[i]:
                path = f"{at}[{i}].bytes"
                raise refuse(ErrorCode.BAD_GEOMETRY, path, expected[i], size * blocks, advice)

    def _buffers(self, geometry: Geometry, owned: Sequence[Owns]) -> list[int] | None:
        """Bytes of a page in each buffer of a rank, in its engine's order; None if other caches share them."""
        groups = {g.id: g for g in geometry.groups}
        kinds = [g.model for g in geometry.groups if [p.name for p in g.parts] in _PLAIN]
        if len(set(kinds)) < len(kinds):  # windowed layers have separate buffers, or share those of others
            return None
        buffers: list[int] = []
        joint = self.engine.entries == "joint"
        for share in owned:
            group = groups[share.group]
            names = [p.name for p in group.parts]
            if names not in _PLAIN:
                if joint:
                    return None
                continue  # states and indexes are registered beside the entries
            lanes = [0] * len(names)
            for span in share.lanes:
                lanes[span.part] += span.hi - span.lo
            sizes = [group.rows * n * p.lane_bytes for n, p in zip(lanes, group.parts, strict=True)]
            buffers += [sum(sizes)] * len(share.layers) if joint else [n for n in sizes for _ in share.layers]
        return buffers


def _sizes(geometry: Geometry) -> dict[str, set[int]]:
    """The values that the target's caches have for each word that a config.json says too."""
    sizes: dict[str, set[int]] = {"kv_heads": set(), "head_dim": set(), "latent": set(), "layers": set()}
    layers: dict[int, set[int]] = {}
    for share in (share for rank in geometry.ranks for share in rank.owns):
        layers.setdefault(share.group, set()).update(map(int, share.layers))
    groups = [g for g in geometry.groups if g.model == 0]
    for part in (part for group in groups for part in group.parts):
        elements = lane_bytes(part) * 8 // BITS[part.dtype]
        if part.name in ("k", "v"):
            sizes["kv_heads"].add(part.lanes)
            sizes["head_dim"].add(elements)
        elif part.name == "latent":
            sizes["latent"].add(part.lanes * elements)
    paged = [g for g in groups if {p.name for p in g.parts} & {"k", "v", "latent"}]
    for counted in (groups, paged):  # layers with a recurrent state count or do not
        sizes["layers"].add(len(set().union(*(layers.get(g.id, ()) for g in counted))))
    return sizes


def _shape(rank: Mapping[str, Any]) -> tuple[Any, ...]:
    return len(rank.get("entries") or ()), rank.get("entry_bytes"), rank.get("state_bytes")
