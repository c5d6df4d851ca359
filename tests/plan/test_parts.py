"""Names of parts: the registry, the constructors that use it, and what is said of aliases."""

import random
from itertools import combinations
from pathlib import Path

import attrs
import pytest

from kvproto.errors import PlanError
from kvproto.planning.geometry import Geometry, mla, owns, validate
from kvproto.planning.layout import Cache, lay_out
from kvproto.planning.parts import ALIASES, PARTS, SCALES, SHARE_OF
from kvproto.planning.plan import plan
from kvproto.wire import to_json
from kvproto.wire.enums import DType, ErrorCode, ItemKind
from kvproto.wire.messages import Part, Rank
from kvproto_conformance.codec import Refusal
from kvproto_conformance.planner import plan as other_plan
from tests.errors import raises
from tests.plan import oracle
from tools.specgen.registry import load

BUILT = [
    Cache.gqa("a", 2, kv_heads=2, head_dim=8, page=4),
    Cache.gqa("b", 2, kv_heads=2, head_dim=64, page=4, scale_block=32),
    Cache.mla("c", 2, latent=16, rope=8, page=4),
    Cache.cross("l", 2, kv_heads=2, head_dim=8, page=4),
    Cache.encoder("m", dim=8, page=4),
    Cache.mla("p", 2, latent=16, rope=8, page=4, split=True),
    Cache.mla("q", 2, latent=128, rope=64, page=4, scale_block=64),
    Cache.indexer("d", 2, head_dim=128, page=4),
    Cache.page_scales("e", 2, kv_heads=2, page=4),
    Cache.page_scales("r", 2, of="latent", page=4),
    Cache.compressed("f", 2, dim=8, tokens_per_row=4, page_rows=2),
    Cache.window("g", 2, kv_heads=2, head_dim=8, ring_rows=4),
    *Cache.mamba1("h", 2, channels=8, state=4, kernel=4),
    *Cache.mamba2("i", 2, heads=4, head_dim=8, groups=1, state=4, kernel=4),
    *Cache.gdn("j", 2, key_heads=2, key_dim=8, value_heads=2, value_dim=8, kernel=4),
    Cache.handoff("k", {"token": (DType.I32, 4), "hidden": (DType.BF16, 64)}),
]
GROUPS = load()["group"]


@pytest.mark.parametrize("cache", BUILT, ids=lambda cache: cache.group.name)
def test_constructors_make_groups_of_the_registry(cache: Cache) -> None:
    names = {p.name for p in cache.group.parts}
    kind = ItemKind(cache.group.kind).name
    assert any(
        set(row["has"]) <= names <= {*row["has"], *row["may"]} and kind in row["kinds"] for row in GROUPS.values()
    )


def test_every_constructor_is_among_them() -> None:
    """But those that take names of parts as they are given: paged and state."""
    source = Path(__file__).read_text()
    makers = {name for name in vars(Cache) if isinstance(vars(Cache)[name], classmethod) and not name.startswith("_")}
    assert {name for name in makers if f"Cache.{name}(" not in source} <= {"state"}


def test_each_group_of_the_registry_has_a_constructor_that_makes_it() -> None:
    made = {frozenset(p.name for p in c.group.parts) for c in BUILT}
    assert all(any({*row["has"]} <= names for names in made) for row in GROUPS.values())


def test_no_alias_is_a_name_and_shares_are_of_names() -> None:
    assert not ALIASES.keys() & set(PARTS)
    assert set(ALIASES.values()) <= set(PARTS)
    assert SHARE_OF.keys() | set(SHARE_OF.values()) <= set(PARTS)


def named(*names: str) -> Geometry:
    """One rank and layer, one group with a part of each name."""
    made = lay_out(
        [Cache.paged("target", 1, parts={f"acme.{n}": (DType.BF16, 1, 16) for n in range(len(names))}, page=4)]
    )
    parts = tuple(attrs.evolve(p, name=name) for p, name in zip(made.groups[0].parts, names, strict=True))
    return attrs.evolve(made, groups=(attrs.evolve(made.groups[0], parts=parts),))


def refusal(source: Geometry, sink: Geometry) -> PlanError:
    with pytest.raises(PlanError) as caught:
        plan(source, sink)
    with raises(Refusal, code=caught.value.code.name, path=caught.value.path):
        other_plan(to_json(source), to_json(sink))
    return caught.value


@pytest.mark.parametrize(("alias", "name"), ALIASES.items())
def test_an_alias_is_not_its_name_and_the_refusal_says_which_to_use(alias: str, name: str) -> None:
    """KVP-PART-ALIAS, both ways round, and for two aliases of one name."""
    for source, sink in ((alias, name), (name, alias)):
        error = refusal(named(source), named(sink))
        assert (error.code, error.path) == (ErrorCode.PART_MISSING, f"groups[target].parts[{sink}]")
        assert (error.mine, error.yours) == (source, sink)
        assert f"both are {name}" in error.advice


@pytest.mark.parametrize(("share", "whole"), SHARE_OF.items())
def test_a_share_is_told_from_the_whole(share: str, whole: str) -> None:
    error = refusal(named(share), named(whole))
    assert f"{share} is the registered name of a share of {whole}" in error.advice
    assert refusal(named(whole), named(share)).advice == error.advice


@pytest.mark.parametrize(("scales", "of"), SCALES.items())
def test_values_are_not_taken_without_their_scales(scales: str, of: str) -> None:
    """KVP-PLAN-SCALES: by the name of the scales or an alias; a sink that takes something else is owed none."""
    for name in (scales, *(alias for alias, name in ALIASES.items() if name == scales)):
        error = refusal(named(of, "odd", name), named(of, "odd"))
        assert (error.code, error.path) == (ErrorCode.PART_MISSING, f"groups[target].parts[{of}]")
        assert (error.mine, error.yours) == (f"{of} and {scales} of layer 0", f"{of} alone, no {scales}")
        assert plan(named(of, "odd", name), named("odd")).routes
        assert plan(named(of, "odd", name), named(of, "odd", name)).routes


REGISTERED = load()["part"]
SCALED = {
    word: {other for scale, row in REGISTERED.items() if row.get("scales") == name for other in (scale, *row["aliases"])}
    for name, about in REGISTERED.items()
    for word in (name, *about["aliases"])
}  # fmt: skip
"""Of every name of a part all names of its scales, from the registry."""


@pytest.mark.parametrize("seed", range(80))
def test_scales_that_are_owed_are_found_one_by_one(seed: int) -> None:
    """KVP-PLAN-SCALES: groups, layers and models apart, under any names, against a search of every layer."""
    rng = random.Random(seed)
    names = rng.sample(["k", "key", "v", "latent", "odd", "k_scale", "k_sf", "v_scale", "ckv_scale", "index_scale"], 6)
    held = [(model, name, layer) for model in (0, 1) for name in names for layer in range(3) if rng.random() < 0.8]
    taken = [at for at in held if rng.random() < rng.choice([0.6, 1.0])]
    source, sink = apart(rng, held), apart(rng, taken or held)
    wanted = oracle.unscaled(source, sink, SCALED)
    if wanted is None:
        assert plan(source, sink).routes
        return
    error = refusal(source, sink)
    assert (error.code, error.path) == (ErrorCode.PART_MISSING, f"groups[{wanted[0]}].parts[{wanted[1]}]")


def apart(rng: random.Random, held: list[tuple[int, str, int]]) -> Geometry:
    """Two ranks; of each model and name one group or two, in any order."""
    layers: dict[tuple[int, str, int], list[int]] = {}
    for model, name, layer in held:
        layers.setdefault((model, name, rng.randint(0, 1)), []).append(layer)
    groups, shares = [], []
    for id_, (model, name, half) in enumerate(rng.sample(sorted(layers), len(layers))):
        group = attrs.evolve(
            mla(id_, f"g{id_}", model, 8, 4), parts=(Part(name=name, dtype=DType.U8, lanes=1, lane_bytes=8),)
        )
        groups.append(group)
        shares.append(owns(group, layers[model, name, half]))
    ranks = tuple(Rank(rank=r, owns=tuple(s for s in shares if r or rng.random() < 0.5)) for r in range(2))
    return Geometry(replica=0, facts=(), groups=tuple(groups), ranks=ranks)


def test_a_name_that_nobody_knows_is_said_to_be_absent() -> None:
    error = refusal(named("k"), named("acme.k_residual"))
    assert (error.mine, error.yours) == ("k of model 0", "acme.k_residual of model 0")


def test_names_of_ones_own_pair_with_themselves() -> None:
    """KVP-PART-W-NAME: a SHOULD of writers, so readers take any name."""
    assert plan(named("acme.k_residual", "odd"), named("acme.k_residual", "odd")).routes


@pytest.mark.parametrize("name", PARTS)
def test_a_part_stated_twice_is_refused(name: str) -> None:
    """KVP-PART-TWICE, under its name and each alias, and under two aliases."""
    for pair in combinations((name, *(a for a, of in ALIASES.items() if of == name)), 2):
        odd = named(*pair)
        with raises(PlanError, code=ErrorCode.BAD_GEOMETRY, path="groups[0].parts") as caught:
            validate(odd)
        assert all(word in caught.value.yours for word in pair)
        with raises(Refusal, code="BAD_GEOMETRY", path="groups[0].parts"):
            other_plan(to_json(odd), to_json(odd))


def test_shares_stand_beside_each_other() -> None:

    validate(named("q_conv", "k_conv", "v_conv"))
