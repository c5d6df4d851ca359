"""A directory as a setting of both adapters."""

from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

import kvproto_sglang.settings
import kvproto_vllm.settings
from kvproto import LocalError
from kvproto_engines.settings import Presence

from .members import Member, decode, hand_over, source, until


def vllm(given: dict[str, Any], prefill: bool) -> kvproto_vllm.settings.Settings:
    return kvproto_vllm.settings.Settings.read(given, "prefill", prefill, not prefill)


def sglang(given: dict[str, Any], prefill: bool) -> kvproto_sglang.settings.Settings:
    return kvproto_sglang.settings.Settings.read({"name": "prefill", **given}, prefill)


@pytest.mark.parametrize("read", [vllm, sglang])
def test_a_decode_engine_follows_what_prefill_registers(read: Any, member: Member, tmp_path: Path) -> None:
    theirs = read({"listen": f"ipc://{tmp_path}/prefill", "register": member.place}, True)
    ours = read({"sources": member.place}, False)
    with source(tmp_path) as prefill, decode() as sink:
        with closing(Presence(theirs, 0, 2, prefill, None)), closing(Presence(ours, 0, 1, None, sink)):
            until(lambda: sink.ready)
            hand_over(prefill, sink)
            if read is sglang:
                assert (ours.source_of("prefill:8998"), ours.replicas("prefill")) == ("prefill", 2)
        assert not member.etcd.rows()[0]


@pytest.mark.parametrize("read", [vllm, sglang])
@pytest.mark.parametrize(
    ("given", "prefill", "at"),
    [
        ({"sources": "dns:prefill"}, False, "sources"),
        ({"sources": "etcd:"}, False, "sources"),
        ({"sources": "dns:p=h:1", "source_keys": "/no/such"}, False, "source_keys"),
        ({"sources": {"p": "ipc:///a"}, "source_keys": "/no/such"}, False, "source_keys"),
        ({"sources": "dns:p=h:1", "source_keys": "/dev/zero"}, False, "source_keys"),
        ({"listen": "ipc:///a", "register": "dns:p=h:1"}, True, "register"),
        ({"listen": "ipc:///a", "register": 7}, True, "register"),
    ],
)
def test_a_setting_that_is_wrong_is_named(read: Any, given: dict[str, Any], prefill: bool, at: str) -> None:
    with pytest.raises(LocalError) as caught:
        read(given, prefill)
    assert caught.value.path.endswith(f".{at}")
