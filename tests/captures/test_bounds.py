"""Small captures that were made to cost much: each is refused by a bound, before the work is done."""

import json
import pickle

import msgpack
import pytest

from kvproto.errors import KvprotoError
from kvproto_captures.capture import messages
from kvproto_captures.interpreter import read
from kvproto_captures.pickles import objects
from tests.commands import Ran

from .shelf import one

GREETING = b"\xff" + bytes(8) + b"\x7f" + bytes(54)
OBJECT = b"\x80\x04cvllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata\nNixlAgentMetadata\n)\x81"


def refused(data: bytes) -> KvprotoError:
    with pytest.raises(KvprotoError) as error:
        [read(raw) for raw in messages(data)]
    return error.value


def text(said: str) -> bytes:
    return b"X" + len(said).to_bytes(4, "little") + said.encode()


def within(value: bytes) -> bytes:
    """A pickle of an object with that attribute."""
    return OBJECT + b"}" + text("a") + value + b"sb."


def test_a_class_is_named_by_text_alone() -> None:
    doubled = b"".join(b"h" + bytes([i]) + b"h" + bytes([i]) + b"\x86\x94" for i in range(200))
    shared = b"\x80\x04)\x94" + doubled + b"h\xc8h\x00\x93."  # 2 to the 200 tuples, as text
    deep = b"\x80\x04)" + b"\x85" * 100_000 + b")\x93."
    for data in (shared, deep, b"\x80\x04K\x01" + text("a") + b"\x93."):
        error = refused(data)
        assert (error.code.name, error.path) == ("BAD_TYPE", "messages[0]")


def test_a_key_of_a_pickle_is_text_or_a_small_number() -> None:
    large = [b"\x8a" + bytes([len(b)]) + b for b in [pickle.encode_long(((1 << 61) - 1) * i) for i in (1, 2)]]
    for key in (*large, b"J\xff\xff\xff\xff", b"\x88", b"C\x01a", b"K\x01\x85", text("a" * 1000) + b"\x85"):
        error = refused(within(b"}" + key + b"Ns"))
        assert (error.code.name, error.path) == ("BAD_TYPE", "messages[0]")
    ((_, state),) = objects(within(b"}(J\xff\xff\x00\x00K\x01K\x02K\x03u"), "x")
    assert state == {"a": {"65535": 1, "2": 3}}


def test_a_number_and_its_digits_are_one_key() -> None:
    error = refused(within(b"}(K\x01" + text("one") + text("1") + text("two") + b"u"))
    assert (error.code.name, error.path, error.yours) == ("REPEATED", "messages[0]", "1")


def test_an_integer_that_no_text_could_show_is_refused() -> None:
    error = refused(within(b"\x8b" + (1 << 16).to_bytes(4, "little") + b"\x01" * (1 << 16)))
    assert (error.code.name, error.path) == ("UNKNOWN_FIELD", "messages[0]")


def test_text_that_a_pickle_shares_is_counted_each_time() -> None:
    shared = b"](" + text("a" * (1 << 16)) + b"\x94" + b"h\x00" * 127 + b"e"
    error = refused(within(shared))
    assert (error.code.name, error.path) == ("TOO_LARGE", "messages[0]")
    ((_, state),) = objects(within(shared.replace(b"h\x00" * 127, b"h\x00" * 125)), "x")
    assert len(state["a"]) == 126


def test_a_key_is_no_longer_than_a_name() -> None:
    values = dict(one("vllm", "0.32.0", "nixl.reply", "regions").record["parsed"])
    values["agent_metadata"] = bytes.fromhex(values["agent_metadata"])

    def packed(length: int) -> bytes:
        made: bytes = msgpack.packb({**values, "packed_member_layouts": {"a" * length: [1]}})
        return made

    error = refused(packed(513))
    assert (error.code.name, error.path) == ("TOO_LARGE", "messages[0].packed_member_layouts")
    assert [read(raw) for raw in messages(packed(512))]


def test_a_long_line_that_is_nearly_hex_is_looked_at_once() -> None:
    for line in (b" " * (1 << 20) + b"x", b"00 " * (1 << 18) + b"x", b"00" + b" " * (1 << 20) + b"x"):
        assert refused(line).path == "messages"  # by squares of the length it would take hours


@pytest.mark.parametrize(
    ("data", "path"),
    [
        (b"00\n" * 70, "messages[0].frames"),
        (b"00\n\n" + b"-\n" * 70, "messages[1].frames"),
        (GREETING + b"\x01\x01a" * 65, "messages[0].frames"),  # and no end of the message
        (GREETING + b"\x04\x00" * ((1 << 18) + 1), "capture"),
        (GREETING + b"\x01\x00" * ((1 << 18) + 1), "capture"),
        (b'{"a": 1}\n' * 5000 + b"no json", "messages"),
    ],
)
def test_what_is_too_many_is_refused_as_it_comes(data: bytes, path: str) -> None:
    error = refused(data)
    assert (error.code.name, error.path, error.yours) == ("TOO_LARGE", path, "more")


@pytest.mark.parametrize("levels", [30, 100_000])
def test_json_that_is_deep_is_refused_in_one_line(
    levels: int, tmp_path_factory: pytest.TempPathFactory, ran: Ran
) -> None:
    file = tmp_path_factory.mktemp("deep") / "config.json"
    file.write_text('{"torch_dtype": ' + "[" * levels + "]" * levels + "}")
    capture = file.with_name("capture.jsonl")
    capture.write_text(json.dumps(one("sglang", "0.5.23", "mooncake.registration", "plain").record))
    said = ["--say", "page=16", "--say", "dtype=bfloat16", "--say", "kv_heads=8"]
    for args in (
        ["describe", str(file)],
        ["describe", str(file), "--engine", "vllm"],
        ["import", str(capture), "--config", str(file), *said],
        ["check", str(file), str(file)],
    ):
        error = ran(*args, status=1)
        assert f"TOO_DEEP at {file}: wanted 16 levels" in error
        assert error.count("\n") == 1


@pytest.mark.parametrize("engine", [[], ["--engine", "vllm"], ["--engine", "sglang"], ["--engine", "trtllm"]])
def test_more_layers_than_any_model_has_are_refused(
    engine: list[str], tmp_path_factory: pytest.TempPathFactory, ran: Ran
) -> None:
    file = tmp_path_factory.mktemp("layers") / "config.json"
    sizes = {"num_attention_heads": 8, "num_key_value_heads": 8, "head_dim": 64, "torch_dtype": "bfloat16"}
    file.write_text(json.dumps({"model_type": "llama", "num_hidden_layers": 300_000_000, **sizes}))
    assert "OUT_OF_RANGE at config.num_hidden_layers: wanted at most 4096" in ran("describe", file, *engine, status=1)
