"""Pages that ranks of other sizes, deals, page lengths or pool layouts wrote, cut as a plan says.

A writer keeps the Description of its share as `g/<geometry>.<page>` beside its pages. A reader joins such
Descriptions into engines, plans from each of them to itself as for a transfer, and runs the copy program from objects
to pages of its own.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from math import lcm

import attrs
import numpy as np

from kvproto.copying.execute import execute
from kvproto.copying.lowering import Pair
from kvproto.copying.program import RankLayout, Window
from kvproto.errors import U32, KvprotoError, PlanError, check_whole
from kvproto.planning.geometry import Geometry, decode_geometry, encode_geometry
from kvproto.planning.plan import Route, plan
from kvproto.rank.machine import machine
from kvproto.tiers.host_copies import as_pool
from kvproto.tiers.manifest import Data, ObjectReferences, manifest_key, names, object_key, object_length
from kvproto.tiers.page_ids import Chain
from kvproto.tiers.page_layout import PageLayout, page_layout, single_rank
from kvproto.tiers.sealing import Seal
from kvproto.tiers.store import Store, get_exact, get_manifest
from kvproto.wire.enums import KeyForm, LengthRule
from kvproto.wire.messages import Component, Manifest

FRESH = 5.0
"""Seconds after which the Descriptions in the store are listed again."""

Pages = list[dict[int, bytes]]


def geometry_key(geometry: bytes, page: int) -> str:
    return f"g/{geometry.hex()}.{page}"


def opens(seal: Seal | None, manifest: Manifest) -> bool:
    """Whether a page is sealed with a key of ours, or not sealed and we have none (KVP-TIER-OPEN, KVP-TIER-PLAIN)."""
    return manifest.seal is None if seal is None else manifest.seal in seal


def get_object(
    store: Store, manifest: Manifest, component: Component, seal: Seal | None, room: memoryview | None = None
) -> Data | None:
    """The bytes of a component, in `room` if that can be; None if any are wrong (KVP-TIER-CHECK). Raises OSError."""
    length = object_length(manifest, component)
    stored = get_exact(store, object_key(manifest, component), length, seal.scratch(length) if seal else room)
    if stored is None or hashlib.sha256(stored).digest() != component.digest:
        return None
    return stored if seal is None else seal.open(manifest, component, stored, room)


@attrs.define
class _WriterEngine:
    """Ranks that may belong to one engine, because their groups do not contradict each other."""

    page: int
    geometry: Geometry
    digests: list[bytes]
    """Geometry digests of the ranks, by number."""

    def add(self, page: int, rank: Geometry, digest: bytes) -> bool:
        """Add a rank if it fits; returns whether it was added."""
        ours = {group.id: group for group in self.geometry.groups}
        theirs = {group.id: group for group in rank.groups}
        rest = attrs.evolve(rank, groups=self.geometry.groups, ranks=self.geometry.ranks)
        if page != self.page or rest != self.geometry:
            return False
        if any(ours.get(id, group) != group for id, group in theirs.items()):
            return False
        groups = tuple(group for _, group in sorted((ours | theirs).items()))
        ranks = (*self.geometry.ranks, attrs.evolve(rank.ranks[0], rank=len(self.digests)))
        self.geometry = attrs.evolve(self.geometry, groups=groups, ranks=ranks)
        self.digests.append(digest)
        return True


class RelayoutReader:
    """The pages of all other geometries in a store, cut for one rank. Any thread may read."""

    def __init__(
        self, store: Store, geometry: Geometry, rank: int, layout: PageLayout, seal: Seal | None = None
    ) -> None:
        """`geometry` is our engine's Description, `layout` the layout of our pages; `seal` as of `PageStore`."""
        self.store, self.layout, self.seal = store, layout, seal
        self.own = single_rank(geometry, rank, [*layout.lengths])
        self._engines: list[_WriterEngine] = []
        self._listed = -FRESH

    def publish_geometry(self) -> None:
        """Write our Description beside our pages; raises OSError."""
        self.store.put(geometry_key(self.layout.geometry, self.layout.page), encode_geometry(self.own))

    def read(self, chain: Chain, first: int) -> Pages:
        """The pages of a prompt from `first` on that any other engine has, by group; raises OSError."""
        best: Pages = []
        for engine in self._writers():
            with suppress(KvprotoError):  # ranks that do not fit together, or not to ours
                best = max(best, self._read_from(engine, chain, first), key=len)
        return best

    def _writers(self) -> list[_WriterEngine]:
        if machine.monotonic() - self._listed > FRESH:
            engines: list[_WriterEngine] = []
            for key in sorted(self.store.keys("g")):
                digest, _, page = key[2:].partition(".")
                data = get_manifest(self.store, key)
                ours = key == geometry_key(self.layout.geometry, self.layout.page)
                if ours or data is None or hashlib.sha256(data).hexdigest() != digest:
                    continue
                with suppress(KvprotoError, ValueError):
                    rank, tokens = decode_geometry(data), check_whole("page", int(page), 1, U32)
                    if rank != single_rank(rank, 0, [group.id for group in rank.groups]):
                        continue
                    if not any(engine.add(tokens, rank, bytes.fromhex(digest)) for engine in engines):
                        engines.append(_WriterEngine(tokens, rank, [bytes.fromhex(digest)]))
            self._engines, self._listed = engines, machine.monotonic()
        return self._engines

    def _read_from(self, engine: _WriterEngine, chain: Chain, first: int) -> Pages:
        """The pages that one engine has; raises PlanError if its ranks and ours have no plan."""
        mine, theirs = self.layout.page, engine.page
        base = first * mine // lcm(mine, theirs) * lcm(mine, theirs)  # the token at which a page of both begins
        prompt = chain if theirs == mine else chain.with_page(theirs)
        manifests = {
            rank: self._manifests(prompt, base // theirs, digest) for rank, digest in enumerate(engine.digests)
        }
        for count in sorted({len(listed) for listed in manifests.values()} - {0}, reverse=True):
            with suppress(PlanError):  # the ranks with so many pages do not own all of ours
                ranks = tuple(rank for rank in engine.geometry.ranks if len(manifests[rank.rank]) >= count)
                routes = plan(attrs.evolve(engine.geometry, ranks=ranks), self.own).routes
                break
        else:
            return []
        pages = (min(base + count * theirs, len(chain.ids(self.layout.form)) * mine) - base) // mine
        if pages <= 0 or base // mine + pages <= first:
            return []
        cut = _Cut(self, engine, routes, manifests, pages, -(-pages * mine // theirs))
        missing = cut.fill()
        if missing is None:
            return []
        return [
            {
                group: bytes(cut.memory[group][i * length : (i + 1) * length])
                for group, length in self.layout.lengths.items()
                if group not in missing[i]
            }
            for i in range(first - base // mine, pages)
        ]

    def _manifests(self, chain: Chain, begin: int, geometry: bytes) -> list[Manifest]:
        """The manifests of a rank's pages from `begin` on, up to the first page that is missing or wrong."""
        manifests: list[Manifest] = []
        for i in range(begin, len(chain.own)):
            for form in (KeyForm.AHEAD, KeyForm.OWN):
                if i >= len(chain.ids(form)):
                    continue
                key = manifest_key(chain.ids(form)[i], geometry)
                manifest = ObjectReferences().add(key, get_manifest(self.store, key))
                ahead = manifest is not None and any(c.form is KeyForm.AHEAD for c in manifest.components)
                # its OWN id does not cover a component that looks ahead
                known = manifest and names(manifest, form, chain, i) and opens(self.seal, manifest)
                if manifest and known and (form is KeyForm.AHEAD or not ahead):
                    manifests.append(manifest)
                    break
            else:
                break
        return manifests


@attrs.define
class _Cut:
    """A copy from the objects of an engine's pages into pages of ours, as routes say."""

    _reader: RelayoutReader
    _engine: _WriterEngine
    _routes: Sequence[Route]
    _manifests: Mapping[int, Sequence[Manifest]]
    """By rank of the engine."""
    _pages: int
    _count: int
    """The number of the engine's first pages that fill `_pages` of ours."""
    memory: dict[int, memoryview] = attrs.field(init=False)
    """Our pages by group, one after the other."""

    def __attrs_post_init__(self) -> None:
        lengths = self._reader.layout.lengths
        self.memory = {group: memoryview(bytearray(n * self._pages)) for group, n in lengths.items()}

    def fill(self) -> list[set[int]] | None:
        """Fill our pages; returns the groups that each lacks, or None if a required group is missing or damaged."""
        layout, theirs, pages = self._reader.layout, self._engine.page, self._pages
        mine = layout.page
        if not self._copy(layout.required, range(self._count), Window(0, pages * mine, np.arange(pages))):
            return None
        missing: list[set[int]] = [set() for _ in range(pages)]
        for group in (c.group for c in layout.components if c.rule is LengthRule.WINDOW):
            since = self._complete_since(group, lcm(mine, theirs) // theirs)
            begin = min(since * theirs // mine, pages)
            window = Window(0, (pages - begin) * mine, np.arange(begin, pages))
            if begin == pages or not self._copy({group}, range(since, self._count), window):
                begin = pages
            for lacking in missing[:begin]:
                lacking.add(group)
        states = {c.group for c in layout.components if c.rule is LengthRule.STATE}
        for i in range(pages):  # a state follows the last token of a page, which may be inside one of their pages
            at, inside = divmod((i + 1) * mine, theirs)
            for group in states:
                window = Window(0, (i + 1) * mine, np.array([i]))
                if inside or not self._copy({group}, range(at - 1, at), window):
                    missing[i].add(group)
        return missing

    def _copy(self, groups: Collection[int], pages: range, window: Window) -> bool:
        """Fill some of our groups from some of their pages; False if an object is missing or wrong (KVP-TIER-CHECK)."""
        layout, engine = self._reader.layout, self._engine
        routes = [route for route in self._routes if route.group in groups]
        for rank in sorted({route.source for route in routes}):
            from_rank = tuple(route for route in routes if route.source == rank)
            manifests = self._manifests[rank][pages.start : pages.stop]
            theirs = page_layout(engine.geometry, rank, engine.page)
            sources = {box.source_group for route in from_rank for box in route.boxes}
            if not self._same_rules(from_rank, manifests[0]):
                return False
            lengths = {group: theirs.component(group).length for group in sources}
            objects = self._load(manifests, lengths)
            if objects is None:
                return False
            source = as_pool(RankLayout(engine.geometry, rank, {}), lengths, len(pages))
            sink = as_pool(RankLayout(self._reader.own, 0, {}), layout.lengths, self._pages)
            have = Window(0, len(pages) * engine.page, np.arange(len(pages)))
            program = Pair(from_rank, source, sink).lower(dict.fromkeys(sources, have), dict.fromkeys(groups, window))
            execute(program, objects, self.memory)
        return True

    def _complete_since(self, group: int, step: int) -> int:
        """The first page, rounded up to where pages of both begin, from which every writer has what `group` needs."""
        needed = {
            (route.source, box.source_group) for route in self._routes if route.group == group for box in route.boxes
        }
        since = 0
        for i in range(self._count):
            held = {(rank, c.group) for rank, _ in needed for c in self._manifests[rank][i].components}
            since = since if needed <= held else i + 1
        return -(-since // step) * step

    def _same_rules(self, routes: Sequence[Route], manifest: Manifest) -> bool:
        """Whether the components of a page count as ours do (KVP-TIER-PARTS)."""
        theirs = {c.group: (c.form, c.rule, c.reach) for c in manifest.components}
        ours = {c.group: (c.form, c.rule, c.reach) for c in self._reader.layout.components}
        pairs = {(route.group, box.source_group) for route in routes for box in route.boxes}
        return all(theirs.get(source) == ours[group] for group, source in pairs)

    def _load(self, manifests: Sequence[Manifest], lengths: Mapping[int, int]) -> Mapping[int, memoryview] | None:
        """The objects of a rank's pages by group, one after the other; None if one is missing or damaged."""
        memory = {}
        for group, length in lengths.items():
            objects = bytearray()
            for manifest in manifests:
                component = next((c for c in manifest.components if c.group == group), None)
                if component is None or component.length != length:
                    return None
                data = get_object(self._reader.store, manifest, component, self._reader.seal)
                if data is None:
                    return None
                objects += data
            memory[group] = memoryview(objects)
        return memory
