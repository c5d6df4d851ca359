"""The connector's settings: read at start, and each mistake named."""

import ast
import io
import socket
import tokenize
from pathlib import Path
from typing import Any

import pytest

import kvproto_sglang
import kvproto_vllm
from kvproto import Cache, DType, LocalError, Parallel, Pool, Seed, Source, lay_out
from kvproto.cli.main import main
from kvproto_engines import described
from kvproto_engines.settings import of_replica, probes_of
from kvproto_vllm.releases import check_release
from kvproto_vllm.settings import Settings
from tests.commands import Ran

LISTEN, SOURCES = {"listen": "ipc:///run/kv/p-{rank}"}, {"sources": {"p": "ipc:///run/kv/p-0"}}


def test_a_name_is_vllms_engine_id_unless_given() -> None:
    assert Settings.read(LISTEN, "id-1", True, False).name == "id-1"
    assert Settings.read(LISTEN | {"name": "p"}, "id-1", True, False).name == "p"


def test_sources_are_addresses_seeds_replicas_or_a_file(tmp_path: Path) -> None:
    given = {"p": "ipc:///a", "p/1": {"address": "tcp://h:1", "key": "k"}}
    wanted = {("p", 0): Seed("ipc:///a"), ("p", 1): Seed("tcp://h:1", "k")}
    assert Settings.read({"sources": given}, "d", False, True).sources == wanted
    (tmp_path / "s.toml").write_text('[[source]]\nengine = "p"\naddress = "ipc:///a"\n')
    read = Settings.read({"sources": str(tmp_path / "s.toml")}, "d", False, True).sources
    assert read == {("p", 0): Seed("ipc:///a")}


def test_ranks_listen_and_are_reached_at_addresses_of_their_own() -> None:
    given = {
        "listen": {"0": "tcp://0.0.0.0:7100", "1": "tcp://0.0.0.0:7101"},
        "advertise": "tcp://p-{replica}:710{rank}",
    }
    made = Settings.read(given, "p", True, False)
    assert of_replica(made.listen, 3) == {0: "tcp://0.0.0.0:7100", 1: "tcp://0.0.0.0:7101"}
    assert of_replica(made.advertise, 3) == "tcp://p-3:710{rank}"
    assert of_replica({0: "tcp://p-{replica}:1"}, 3) == {0: "tcp://p-3:1"}


def test_each_rank_answers_probes_at_a_port_of_its_own(tmp_path: Path) -> None:
    place = Settings.read(LISTEN | {"probes": "127.0.0.1:7000"}, "p", True, False).probes
    assert probes_of(None, 0) is None
    geometry = lay_out([Cache.gqa("kv", 1, kv_heads=2, head_dim=8, page=16, dtype=DType.F32)], Parallel(tp=2), 3)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = taken.getsockname()[1]
        taken.listen()
        with (
            Source("p", Pool.allocate(geometry, 4, rank=1), f"ipc://{tmp_path}/p-{{rank}}") as source,
            pytest.raises(LocalError, match=rf"probes: .*127\.0\.0\.1:{port}: .*in use"),
        ):
            probes_of(f"127.0.0.1:{port - 3 * 256 - 1}", 3, source)
    assert place == "127.0.0.1:7000"


def test_options_are_those_of_kvproto() -> None:
    assert Settings.read(LISTEN | {"options": {"verify": "pages"}}, "p", True, False).options.verify == "pages"


@pytest.mark.parametrize(
    ("given", "roles", "says"),
    [
        ({}, (True, False), "listen"),
        ({"listen": {}}, (True, False), "listen"),
        ({"listen": {"first": "ipc:///a"}}, (True, False), "listen"),
        ({"listen": {"0": 7}}, (True, False), "listen"),
        (LISTEN | {"advertise": 7}, (True, False), "advertise"),
        (LISTEN | {"probes": 9400}, (True, False), "probes"),
        (LISTEN | {"probes": "all"}, (True, False), "probes"),
        ({}, (False, True), "sources"),
        (LISTEN, (True, True), "sources"),
        (LISTEN | {"lisden": 1}, (True, False), "lisden"),
        (LISTEN | {"pages": "some"}, (True, False), "pages"),
        (LISTEN | {"deadline": 0}, (True, False), "deadline"),
        (LISTEN | {"deadline": True}, (True, False), "deadline"),
        (LISTEN | {"options": {"ticket_wait": 0}}, (True, False), "ticket_wait"),
        (LISTEN | {"description": 7}, (True, False), "description"),
        (LISTEN | {"options": []}, (True, False), "options"),
        (LISTEN | {"options": {"verfy": 1}}, (True, False), "verfy"),
        (LISTEN | {"options": {"spread": "most"}}, (True, False), "spread"),
        ({"sources": 7}, (False, True), "sources"),
        ({"sources": {"p/x": "ipc:///a"}}, (False, True), "p/x"),
        ({"sources": {"p": {"adress": "ipc:///a"}}}, (False, True), "adress"),
    ],
)
def test_a_mistake_is_named(given: Any, roles: tuple[bool, bool], says: str) -> None:
    with pytest.raises(LocalError, match=says):
        Settings.read(given, "me", *roles)


def test_engines_write_descriptions_that_check_compares(tmp_path: Path, ran: Ran) -> None:
    for name, heads, tp, replica in (("one", 4, 2, 1), ("two", 4, 1, 0), ("other", 8, 1, 0)):
        cache = Cache.gqa("kv", range(2), kv_heads=heads, head_dim=8, page=16, dtype=DType.F32)
        for rank in reversed(range(tp)):
            pool = Pool.allocate(lay_out([cache], Parallel(tp=tp), replica), 4, rank=rank)
            described.write("settings", f"{tmp_path}/{name}-{{replica}}.json", pool, replica)
            assert bool(list(tmp_path.glob(f"{name}*"))) == (rank == 0)
    one, two, other = (str(tmp_path / each) for each in ("one-1.json", "two-0.json", "other-0.json"))
    assert main(["check", one, two]) == 0
    assert "kv" in ran("check", one, other, status=3)
    with pytest.raises(LocalError, match=r"settings\.description"):
        described.write("settings", str(tmp_path / "none" / "d.json"), pool, 0)


def test_a_release_that_is_not_known_is_refused() -> None:
    check_release("0.32.0+cpu")
    check_release("0.33.1")
    check_release("0.26.0")
    for version in ("0.31.0", "0.3.2", "1.0", "0.27.0"):
        with pytest.raises(LocalError, match=version):
            check_release(version)


@pytest.mark.parametrize(
    ("package", "adapter"),
    [(kvproto_vllm, "."), (kvproto_vllm, "hints"), (kvproto_vllm, "pools"), (kvproto_vllm, "tiers"), (kvproto_sglang, "."), (kvproto_sglang, "tiers"), (kvproto_sglang, "pools")],
)  # fmt: skip
def test_an_adapter_is_under_1000_lines_of_code(package: Any, adapter: str) -> None:
    """Lines that hold code: no blank ones, no comments, no docstrings."""
    counted = 0
    for path in (Path(package.__file__).parent / adapter).glob("*.py"):
        text, lines = path.read_text(), set[int]()
        for token in tokenize.generate_tokens(io.StringIO(text).readline):
            if token.type not in _NO_CODE:
                lines |= set(range(token.start[0], token.end[0] + 1))
        for each in ast.walk(ast.parse(text)):
            if isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant):
                lines -= set(range(each.lineno, (each.end_lineno or 0) + 1))
        counted += len(lines)
    assert 0 < counted < 1000, counted


_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER,
}  # fmt: skip
