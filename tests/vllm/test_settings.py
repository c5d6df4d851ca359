"""The connector's settings: read at start, and each mistake named."""

from pathlib import Path
from typing import Any

import pytest

from kvproto import LocalError, Seed
from kvproto_vllm.releases import check_release
from kvproto_vllm.settings import Settings

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


def test_options_are_those_of_kvproto() -> None:
    assert Settings.read(LISTEN | {"options": {"verify": "pages"}}, "p", True, False).options.verify == "pages"


@pytest.mark.parametrize(
    ("given", "roles", "says"),
    [
        ({}, (True, False), "listen"),
        ({}, (False, True), "sources"),
        (LISTEN, (True, True), "sources"),
        (LISTEN | {"lisden": 1}, (True, False), "lisden"),
        (LISTEN | {"pages": "some"}, (True, False), "pages"),
        (LISTEN | {"deadline": 0}, (True, False), "deadline"),
        (LISTEN | {"deadline": True}, (True, False), "deadline"),
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


def test_a_release_that_is_not_known_is_refused() -> None:
    check_release("0.32.0+cpu")
    check_release("0.33.1")
    check_release("0.26.0")
    for version in ("0.31.0", "0.3.2", "1.0", "0.27.0"):
        with pytest.raises(LocalError, match=version):
            check_release(version)
