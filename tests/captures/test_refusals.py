"""Captures that are cut, reordered, of unknown releases, or made to harm: refused by code and path, quickly."""

import io
import json
import pickle
import struct
from collections.abc import Callable
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvproto.errors import KvprotoError, LocalError
from kvproto.wire.enums import ErrorCode
from kvproto.wire.plain import DEPTH
from kvproto_captures.capture import messages
from kvproto_captures.fleet import Fleet
from kvproto_captures.interpreter import read, resolve

from .shelf import ENGINES, lines, one

REGISTRATION = "mooncake.registration"


def refusal(data: bytes, **known: str) -> tuple[str, str]:
    with pytest.raises(KvprotoError) as refused:
        fleet(data, **known)
    return refused.value.code.name, refused.value.path


def fleet(data: bytes, **known: str) -> Fleet:
    return Fleet.of(resolve([read(raw, **known) for raw in messages(data)]))


def frames(change: Callable[[list[str]], Any], release: str = "0.5.23", variant: str = "hybrid") -> bytes:
    """A registration with its frames, as hex, changed."""
    record = dict(one("sglang", release, REGISTRATION, variant).record)
    held = list(record["frames"])
    change(held)
    return json.dumps({"frames": held}).encode()


def put(at: int, value: bytes) -> Callable[[list[str]], None]:
    return lambda held: held.__setitem__(at, value.hex())


@pytest.mark.parametrize(
    ("change", "code", "path"),
    [
        (lambda held: held.__delitem__(slice(17, None)), "UNSUPPORTED_VERSION", ".frames"),
        (lambda held: held.append(""), "UNSUPPORTED_VERSION", ".frames"),
        (lambda held: held.__delitem__(slice(None)), "UNKNOWN_MESSAGE", ""),
        (lambda held: held.reverse(), "UNKNOWN_MESSAGE", ""),
        (put(2, b"80_80"), "BAD_TYPE", ".dst_port"),
        (put(2, b"9" * 5000), "BAD_TYPE", ".dst_port"),
        (put(1, b"\xff"), "BAD_TEXT", ".endpoint"),
        (put(1, b"10.0.0.1\x1b[2J"), "BAD_TEXT", ".endpoint"),
        (put(4, b"1234567"), "BAD_LENGTH", ".dst_kv_ptrs"),
        (put(6, b"\xff\xff\xff\xff"), "TRUNCATED", ".dst_state_data_ptrs"),
        (put(6, struct.pack("<II", 1, 0xFFFF_FFF8)), "TRUNCATED", ".dst_state_data_ptrs"),
        (put(6, struct.pack("<IIQQ", 1, 8, 1, 2)), "TRAILING_BYTES", ".dst_state_data_ptrs"),
        (put(6, struct.pack("<II", 1, 4) + b"1234"), "BAD_LENGTH", ".dst_state_data_ptrs[0]"),
        (put(6, struct.pack("<I", 5000) + bytes(20_000)), "TOO_LARGE", ".dst_state_data_ptrs"),
        (put(14, b"1234"), "BAD_LENGTH", ".staging_base_ptr"),
    ],
)
def test_a_frame_that_is_wrong_is_named(change: Callable[[list[str]], Any], code: str, path: str) -> None:
    assert refusal(frames(change)) == (code, f"messages[0]{path}")


@pytest.mark.parametrize(
    ("said", "path"),
    [
        ({"tp_rank": b"4"}, "messages[0].tp_rank"),
        ({"tp": b"0"}, "messages[0].dst_attn_tp_size"),
        ({"tp": b"99999999999"}, "messages[0].dst_attn_tp_size"),
        ({"tp": b"-4"}, "messages[0].dst_attn_tp_size"),
    ],
)
def test_ranks_that_no_fleet_has_are_refused(said: dict[str, bytes], path: str) -> None:
    def change(held: list[str]) -> None:
        for word, value in said.items():
            put({"tp_rank": 7, "tp": 8}[word], value)(held)

    assert refusal(frames(change)) == ("OUT_OF_RANGE", path)


def test_a_frame_less_is_an_older_release_unless_the_release_is_known() -> None:
    shorter = frames(lambda held: held.pop())
    assert fleet(shorter).name == "sglang 0.5.20"
    assert refusal(shorter, name="sglang", release="0.5.23") == ("OUT_OF_RANGE", "messages[0].frames")


def test_releases_without_a_table_are_refused_by_name() -> None:
    data = frames(lambda held: None)
    for release in ("0.6.0", "0.4.5", "latest"):
        assert refusal(data, name="sglang", release=release) == ("UNSUPPORTED_VERSION", "release")
    with pytest.raises(LocalError, match=r"0\.4\.6\.post5 to 0\.5\.23"):
        fleet(data, name="sglang", release="0.6.0")


def test_a_release_between_two_that_were_examined_is_read_where_they_agree() -> None:
    data = frames(lambda held: None, "0.5.14")
    assert fleet(data, name="sglang", release="0.5.15").name == "sglang 0.5.14 to 0.5.16"
    assert refusal(frames(lambda held: None), name="sglang", release="0.5.11")[0] == "UNSUPPORTED_VERSION"


def test_two_ways_to_read_a_message_need_the_release() -> None:
    record = one("sglang", "0.4.6.post5", "mooncake.transfer", "plain").record
    bare = json.dumps({"frames": record["frames"]}).encode()
    assert refusal(bare) == ("FIELD_CONFLICT", "messages[0].dst_kv_indices")
    (reading,) = resolve([read(raw, "sglang", "0.4.6.post5") for raw in messages(bare)])
    assert reading.values["dst_kv_indices"] == [7, 8, 9, 20, 21]


def test_two_fleets_in_one_file_are_refused() -> None:
    a, b = (frames(lambda held: None, release) for release in ("0.5.23", "0.5.18"))
    assert refusal(a + b"\n" + b) == ("FIELD_CONFLICT", "messages[1]")
    other = frames(put(8, b"8"))
    assert refusal(a + b"\n" + other) == ("FIELD_CONFLICT", "messages[1].dst_attn_tp_size")
    regrown = frames(put(9, b"131072"), variant="plain")
    assert refusal(frames(put(19, b""), variant="plain") + b"\n" + regrown)[0] == "FIELD_CONFLICT"


def test_control_characters_of_a_capture_do_not_reach_the_terminal() -> None:
    with pytest.raises(KvprotoError) as refused:
        fleet(json.dumps({"engine_id": "x", "\x1b[2J": 1}).encode())
    assert str(refused.value).isprintable()


def _map(**change: Any) -> bytes:
    """vLLM's metadata, as msgpack, with keys changed or, by None, left out."""
    values = {**one("vllm", "0.32.0", "nixl.reply", "regions").record["parsed"]}
    values["agent_metadata"] = bytes.fromhex(values["agent_metadata"])
    packed: bytes = msgpack.packb({k: v for k, v in {**values, **change}.items() if v != "-"})
    return packed


@pytest.mark.parametrize(
    ("data", "code", "path"),
    [
        (_map(block_size="-"), "MISSING_FIELD", ".block_size"),
        (_map(tensor_parallel=4), "UNKNOWN_FIELD", ".tensor_parallel"),
        (_map(block_size=float("nan")), "OUT_OF_RANGE", ""),
        (_map(block_size=True), "BAD_TYPE", ".block_size"),
        (_map(block_size=0), "OUT_OF_RANGE", ".block_size"),
        (_map(block_lens=[1, "2"]), "BAD_TYPE", ".block_lens[1]"),
        (_map(region_members=[["a"], [1]]), "BAD_TYPE", ".region_members[1][0]"),
        (_map(engine_id=msgpack.ExtType(4, b"x")), "BAD_TYPE", ""),
        (_map(engine_id="\x1b[2J"), "BAD_TEXT", ".engine_id"),
        (_map(packed_member_layouts={"\x1b[2J": [1]}), "BAD_TEXT", ".packed_member_layouts"),
        (_map()[:-3], "TRUNCATED", ""),
        (_map() + b"\x00", "TRAILING_BYTES", ""),
        (b"\x82\xa1a\x01\xa1a\x02", "REPEATED", ""),
        (b"\xdf\xff\xff\xff\xff\xa1a", "TOO_LARGE", ""),
        (b"\x91" * 100_000, "TOO_DEEP", ""),
        (b"\x91" * (DEPTH + 2) + b"\x01", "TOO_DEEP", ""),
        (b'{"a": NaN}', "OUT_OF_RANGE", ""),
        (b'{"a": 1, "a": 2}', "REPEATED", ""),
        (b"[" * 100_000, "TOO_DEEP", ""),
        (b'{"frames": ["zz"]}', "BAD_TYPE", ".frames[0]"),
        (b'{"frames": 7}', "BAD_TYPE", ".frames"),
        (b"[1]", "BAD_TYPE", ""),
        (b'{"mood": "good"}', "UNKNOWN_MESSAGE", ""),
        (json.dumps({"frames": [""] * 65}).encode(), "TOO_LARGE", ".frames"),
    ],
)
def test_a_map_that_is_wrong_is_named(data: bytes, code: str, path: str) -> None:
    assert refusal(data) == (code, f"messages[0]{path}")


@pytest.mark.parametrize("data", [b"", b"   \n", b"\xfe\x01\x02", b"a log without a line that is known\n"])
def test_what_is_no_capture_is_refused(data: bytes) -> None:
    assert refusal(data)[0] in ("MISSING_FIELD", "UNKNOWN_MESSAGE")


GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes(54)


@pytest.mark.parametrize(
    ("stream", "code", "path"),
    [
        (GREETING[:40], "TRUNCATED", "capture"),
        (GREETING + b"\x00", "TRUNCATED", "messages[0].frames[0]"),
        (GREETING + b"\x01\x01a", "TRUNCATED", "messages[0]"),
        (GREETING + b"\x02" + b"\xff" * 8, "TRUNCATED", "messages[0].frames[0]"),
        (GREETING + b"\x40\x01a", "UNKNOWN_FLAG", "messages[0].frames[0]"),
        (GREETING, "MISSING_FIELD", "messages"),
    ],
)
def test_a_connection_that_is_cut_is_named(stream: bytes, code: str, path: str) -> None:
    assert refusal(stream) == (code, path)


def test_more_numbers_than_a_cache_has_buffers_are_refused() -> None:
    held = [bytes.fromhex(f) for f in one("sglang", "0.5.23", REGISTRATION, "plain").record["frames"]]
    held[12] = bytes(4 << 20 | 4)
    stream = GREETING + b"".join(b"\x03" + len(f).to_bytes(8, "big") + f for f in held[:-1])
    last = b"\x02" + len(held[-1]).to_bytes(8, "big") + held[-1]
    assert refusal(stream + last) == ("TOO_LARGE", "messages[0].dst_kv_layer_ids")


class Harm:
    def __reduce__(self) -> Any:
        return (print, ("loaded",))


def test_a_pickle_that_would_call_something_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    for protocol in (2, 3, 4, 5):
        assert refusal(pickle.dumps(Harm(), protocol)) == ("UNKNOWN_FIELD", "messages[0]")
    assert capsys.readouterr().out == ""


def test_pickles_made_to_harm_are_refused() -> None:
    endless: list[Any] = []
    endless.append(endless)
    billion: list[Any] = [0]
    for _ in range(30):
        billion = [billion] * 10
    name = b"vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata\nNixlAgentMetadata\n"

    def within(value: Any) -> bytes:
        return b"\x80\x02c" + name + b")\x81}X\x01\x00\x00\x00a" + pickle.dumps(value, 2)[2:-1] + b"sb."

    assert refusal(within(endless)) == ("TOO_DEEP", "messages[0]")
    assert refusal(within(billion))[0] in ("TOO_DEEP", "TOO_LARGE")
    assert refusal(within(1.5))[0] == "UNKNOWN_FIELD"
    many = within([0] * 2_000)[2:-1]
    shared = b"\x80\x02](" + many + b"q\x01" + b"h\x01" * 2_000 + b"e."
    assert refusal(shared) == ("TOO_LARGE", "messages[0]")
    assert refusal(pickle.dumps({"a": 1}, 4)) == ("BAD_TYPE", "messages[0][0]")
    assert refusal(b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.") == ("TRUNCATED", "messages[0]")
    assert refusal(b"\x80\x04.") == ("TRUNCATED", "messages[0]")
    assert refusal(b"\x80\x04t.") == ("TRUNCATED", "messages[0]")
    assert refusal(b"\x80\x04" + b"N" * (1 << 20) + b"NN.") == ("TOO_LARGE", "messages[0]")
    assert refusal(b"\x80\x04" + b"N" * 400_000 + b"(t" * 100_000 + b".") == ("TRUNCATED", "messages[0]")


SAMPLES = [
    lines("sglang", "0.5.23", "mooncake.registration hybrid", "mooncake.transfer hybrid"),
    lines("sglang", "0.5.10", "nixl.registration staging", "nixl.transfer plain", "bootstrap.put plain"),
    lines("vllm", ENGINES["vllm"][-1], "nixl.request regions", "nixl.reply regions", "nixl.params pull"),
]


@given(st.sampled_from(SAMPLES), st.data())
@settings(max_examples=100, deadline=None)
def test_a_mutated_capture_is_read_or_refused(sample: bytes, data: st.DataObject) -> None:
    records = [json.loads(line) for line in sample.splitlines()]
    record = data.draw(st.sampled_from(records))
    record.pop(data.draw(st.sampled_from(["release", "package", "variant"])), None)
    held = record.get("frames", [])
    for _ in range(data.draw(st.integers(1, 3)) if held else 0):
        at = data.draw(st.integers(0, len(held) - 1))
        raw = bytearray.fromhex(held[at])
        way = data.draw(st.sampled_from(["flip", "cut", "swap", "grow", "any"]))
        if way == "flip" and raw:
            raw[data.draw(st.integers(0, len(raw) - 1))] ^= 1 << data.draw(st.integers(0, 7))
        elif way == "cut":
            del raw[data.draw(st.integers(0, len(raw))) :]
        elif way == "grow":
            raw += data.draw(st.binary(max_size=9))
        elif way == "any":
            raw = bytearray(data.draw(st.binary(max_size=40)))
        other = data.draw(st.integers(0, len(held) - 1))
        held[at] = bytes(raw).hex()
        if way == "swap":
            held[at], held[other] = held[other], held[at]
    _read_or_refused("".join(json.dumps(r) + "\n" for r in records).encode())


@given(
    st.one_of(
        st.binary(max_size=300),
        st.binary(max_size=200).map(lambda b: b"\x80\x04" + b + b"."),
        st.binary(max_size=200).map(lambda b: GREETING + b),
        st.recursive(
            st.none() | st.booleans() | st.integers(-(1 << 63), 1 << 64 - 1) | st.floats() | st.text(max_size=5),
            lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=9), inner, max_size=4),
        ).map(lambda v: json.dumps(v).encode()),
    )
)
@settings(max_examples=100, deadline=None)
def test_any_bytes_are_read_or_refused(data: bytes) -> None:
    _read_or_refused(data)


def _read_or_refused(data: bytes) -> None:
    try:
        list(fleet(data).unsaid())
    except KvprotoError as error:
        _named(error)


def _named(error: KvprotoError) -> None:
    assert error.code in ErrorCode
    assert error.path


def test_a_mutated_pickle_never_loads_anything(monkeypatch: pytest.MonkeyPatch) -> None:
    def loaded(*args: Any, **more: Any) -> Any:
        raise AssertionError("a pickle was loaded")

    monkeypatch.setattr(pickle, "loads", loaded)
    monkeypatch.setattr(pickle, "Unpickler", loaded)
    buffer = io.BytesIO()
    pickle._Pickler(buffer, 4).dump({"a": [1, 2, (3, b"x")], "b": None})  # type: ignore[attr-defined]
    whole = buffer.getvalue()
    for at in range(2, len(whole) - 1):
        for bit in range(8):
            _read_or_refused(whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :])
