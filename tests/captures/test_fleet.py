"""From the messages of a fleet to its Description: what is stated, what follows, what is unsaid, what contradicts."""

import json
import pickle
import struct
from pathlib import Path
from typing import Any

import pytest

from kvproto.errors import KvprotoError, LocalError
from kvproto.planning.cache import Cache
from kvproto.planning.geometry import encode_geometry
from kvproto.planning.layout import Parallel, lay_out
from kvproto.planning.plan import plan
from kvproto.wire.enums import DType
from kvproto_captures.capture import messages
from kvproto_captures.compare import compare
from kvproto_captures.fleet import Fleet
from kvproto_captures.interpreter import read, resolve
from kvproto_captures.tables import engines, words
from tests.errors import raises

from .shelf import CAPTURES, lines, one

SAID = {"page": "16", "dtype": "bfloat16", "kv_heads": "8"}


def sized(layers: int, kv_heads: int, heads: int, head_dim: int) -> dict[str, int]:
    """A config.json."""
    attention = {"num_key_value_heads": kv_heads, "num_attention_heads": heads, "head_dim": head_dim}
    return {"num_hidden_layers": layers, "hidden_size": heads * head_dim, **attention}


CONFIG = sized(3, 8, 16, 64)


def fleet(*names: str, said: dict[str, str] | None = None) -> Fleet:
    """Of committed files, one after the other."""
    return of(b"\n".join((CAPTURES / name).read_bytes() for name in names), said)


def of(data: bytes, said: dict[str, str] | None = None) -> Fleet:
    return Fleet.of(resolve([read(raw) for raw in messages(data)]), said)


def test_a_running_sglang_pool_becomes_its_description() -> None:
    made = fleet("sglang-live.jsonl", said=SAID).describe()
    same = lay_out([Cache.gqa("target", 3, kv_heads=8, head_dim=64, page=16, dtype=DType.BF16)], Parallel(tp=4))
    assert encode_geometry(made) == encode_geometry(same)
    assert encode_geometry(fleet("sglang-live.jsonl", said=SAID).describe(CONFIG)) == encode_geometry(same)


def test_a_running_vllm_becomes_its_description_with_what_it_logs() -> None:
    data = (CAPTURES / "vllm-live.jsonl").read_bytes()
    logged = fleet("vllm-live.log").known()
    assert (logged["dtype"], logged["tp"], logged["kv_heads"]) == ("BF16", 2, 4)
    made = of(data, {"dtype": "bfloat16", "kv_heads": str(logged["kv_heads"])}).describe()
    same = lay_out([Cache.gqa("target", 4, kv_heads=4, head_dim=32, page=32, dtype=DType.BF16)], Parallel(tp=2))
    assert encode_geometry(made) == encode_geometry(same)


def test_prefill_of_one_engine_plans_with_decode_of_the_other() -> None:
    said = {"dtype": "bfloat16", "kv_heads": "4"}
    sink = fleet("vllm-live.jsonl", said=said).describe()
    put = dict(one("sglang", "0.5.23", "bootstrap.put", "plain").record["json"], attn_tp_rank=0, pp_rank=0, pp_size=1)
    source = of(json.dumps(put).encode()).describe(sized(4, 4, 8, 32))
    assert len(plan(source, sink).routes) > 0


def test_what_is_unsaid_is_listed_with_how_to_say_it() -> None:
    bare = fleet("sglang-live.jsonl")
    needed = {u.word: u.say for u in bare.unsaid() if u.usual is None}
    assert list(needed) == ["page", "dtype", "kv_heads", "head_dim", "layers"]
    with pytest.raises(LocalError) as refused:
        bare.describe()
    assert (refused.value.code.name, refused.value.path) == ("MISSING_FIELD", "page")
    assert "--say page=" in refused.value.advice
    assert [(u.word, u.usual) for u in fleet("sglang-live.jsonl", said=SAID).unsaid()] == [("pp", 1), ("cp", 1)]
    assert "interleave" in {u.word for u in of(lines("vllm", "0.33.0", "nixl.reply regions")).unsaid()}


@pytest.mark.parametrize(
    ("said", "path"),
    [
        ({"page": "32"}, "ranks[0].entries[0].bytes"),
        ({"head_dim": "128"}, "ranks[0].entries[0].bytes"),
        ({"dtype": "float32", "head_dim": "64"}, "ranks[0].entries[0].bytes"),
        ({"kv_heads": "16", "head_dim": "64"}, "ranks[0].entries[0].bytes"),
        ({"layers": "4"}, "ranks[0].entries"),
    ],
)
def test_a_word_said_wrongly_does_not_fit_the_buffers(said: dict[str, str], path: str) -> None:
    said = {**SAID, "head_dim": "64", **said}
    with pytest.raises(KvprotoError) as refused:
        fleet("sglang-live.jsonl", said=said).describe()
    assert (refused.value.code.name, refused.value.path) == ("BAD_GEOMETRY", path)


@pytest.mark.parametrize(
    ("said", "path"),
    [({"tp": "8"}, "say tp"), ({"mood": "8"}, "say"), ({"page": "x"}, "say page"), ({"dtype": "int5"}, "say dtype")],
)
def test_what_cannot_be_said_is_refused(said: dict[str, str], path: str) -> None:
    with raises(LocalError, path=path):
        fleet("sglang-live.jsonl", said=said)


@pytest.mark.parametrize(("word", "value"), [("kv_heads", "3"), ("head_dim", "32"), ("layers", "7")])
def test_a_word_said_otherwise_than_the_config_has_it(word: str, value: str) -> None:
    right = {"kv_heads": "8", "head_dim": "64", "layers": "3"}
    fleet("vllm-live.log", said={"page": "16"}).describe({**CONFIG, "num_key_value_heads": 4})
    bare = {"tp": "4", "page": "16", "dtype": "bfloat16"}
    put = dict(one("sglang", "0.5.23", "bootstrap.put", "plain").record["json"], attn_tp_rank=0, pp_rank=0, pp_size=1)
    bare = {name: text for name, text in bare.items() if name not in of(json.dumps(put).encode()).known()}
    of(json.dumps(put).encode(), {**bare, **right}).describe(CONFIG)
    with pytest.raises(LocalError) as refused:
        of(json.dumps(put).encode(), {**bare, **right, word: value}).describe(CONFIG)
    assert (refused.value.code.name, refused.value.path) == ("FIELD_CONFLICT", f"say {word}")
    assert refused.value.mine == f"{right[word]}, by config.json"


def test_a_capture_that_states_otherwise_than_the_config() -> None:
    with raises(LocalError, match="FIELD_CONFLICT at messages", mine="8, by config.json", yours="4"):
        fleet("vllm-live.log", said={"page": "16"}).describe(CONFIG)


def test_a_word_without_an_effect_is_refused() -> None:
    latent = {"tp": "1", "page": "16", "dtype": "bfloat16", "latent": "576", "layers": "2"}
    line = b"server_args={'model_path': 'm'}"
    of(line, latent).describe()
    with pytest.raises(LocalError, match="say kv_heads: expected words with an effect"):
        of(line, {**latent, "kv_heads": "8"}).describe()


@pytest.mark.parametrize("stamp", ["", "[2025-05-06 06:24:25] ", "[2026-02-16 14:02:09] INFO engine.py:156: "])
def test_a_log_of_sglang_is_read_line_by_line(stamp: str) -> None:
    before = "[2025-05-06 06:24:24] Attention backend not specified. Use fa3 backend by default.\n"
    said = "server_args=ServerArgs(model_path='m', dtype='auto', kv_cache_dtype='fp8_e5m2', page_size=64, pp_size=2)"
    logged = of(f"{before}{stamp}{said}\n".encode())
    assert (logged.name, logged.messages[0].message.name) == ("sglang 0.4.6.post5 to 0.5.22", "log.server_args")
    assert {"page": 64, "dtype": "F8E5M2", "pp": 2}.items() <= logged.known().items()
    with pytest.raises(KvprotoError, match=r"MISSING_FIELD at messages\[0\].model_path.*page_size, kv_cache_dtype"):
        of(f"{before}{stamp}server_args=ServerArgs(tp_size=8)\n".encode())


@pytest.mark.parametrize("dcp", [1, 2])
def test_a_draft_and_a_latent_are_held_against_the_buffers_too(dcp: int) -> None:
    """With DCP a draft's pages are as wide as those of all ranks together, and it has the heads of its TP rank."""
    latent, whole = 64 * 576 * 2, 64 * 2 * 128 * 2
    changed = {7: b"0", 8: b"%d" % dcp, 9: b"%d" % latent, 16: b"%d" % dcp, 17: b"0"}
    changed |= {4: struct.pack("<4Q", 1, 2, 3, 4), 19: struct.pack("<4Q", latent, latent, whole, whole)}
    frames = list(one("sglang", "0.5.23", "mooncake.registration", "plain").record["frames"])
    for at, value in changed.items():
        frames[at] = value.hex()
    data = json.dumps({"frames": frames}).encode()
    target = {"num_hidden_layers": 2, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    draft = {"num_hidden_layers": 1, "num_key_value_heads": 2, "head_dim": 128, "num_attention_heads": 4}
    said = {"page": "64", "dtype": "bfloat16"}
    made = of(data, said).describe(target, [draft])
    assert [(g.name, g.rows, g.cp_size) for g in made.groups] == [("target", 64, dcp), ("draft", 64 * dcp, 1)]
    with pytest.raises(KvprotoError, match="BAD_GEOMETRY"):
        of(data, said).describe(target)


def test_windowed_layers_are_not_held_against_the_buffers() -> None:
    config = {
        **CONFIG,
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 64,
    }
    made = fleet("sglang-live.jsonl", said={"page": "16", "dtype": "bfloat16"}).describe(config)
    assert [group.name for group in made.groups] == ["target", "target window"]


def test_each_sample_line_of_the_documentation_is_read() -> None:
    page = (Path(__file__).parents[2] / "docs" / "import.md").read_text()
    samples = page.partition("```text\n")[2].partition("```")[0].splitlines()
    read_as = {of(line.encode()).messages[0].message.name for line in samples}
    logs = {message.name for engine in engines().values() for message in engine.messages if message.form == "log"}
    assert read_as == {"nixl.transfer", "bootstrap.put", "nixl.params"} | logs


def test_the_page_of_the_documentation_names_every_message_and_word() -> None:
    page = (Path(__file__).parents[2] / "docs" / "import.md").read_text()
    for engine in engines().values():
        assert f"{engine.releases[0]} to {engine.releases[-1]}" in page
        for message in engine.messages:
            assert f"`{message.name}`" in page
    for word, row in words()["word"].items():
        assert "say" not in row or f"`{word}`" in page


def test_pickled_metadata_reads_as_the_frames_do() -> None:
    for release, message in (("0.12.0", "nixl.metadata"), ("0.33.0", "nixl.payload")):
        (reading,) = resolve([read(raw) for raw in messages((CAPTURES / f"vllm-{release}.pickle").read_bytes())])
        (sent,) = resolve([read(raw) for raw in messages(lines("vllm", release, "nixl.reply regions"))])
        assert reading.message.name == message
        assert reading.values == sent.values["metadata" if message == "nixl.metadata" else "payload"]


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
def test_every_protocol_of_pickle_is_walked(protocol: int) -> None:
    plain: dict[str, Any] = {"a": [1, 300, 70_000, 1 << 40], "b": (1, 2, 3, 4), "c": None, "d": {"e": True, "f": "x"}}
    name = "vllm.distributed.kv_transfer.kv_connector.v1.nixl.metadata.NixlAgentMetadata"
    head = b"\x80" + bytes([protocol]) + b"c" + name.rpartition(".")[0].encode() + b"\nNixlAgentMetadata\n)\x81"
    body = pickle.dumps(plain, protocol)
    start = 2 + (9 if protocol >= 4 else 0)
    (raw,) = messages(head + body[start:-1] + b"b.")
    assert raw.kind == name
    assert raw.value == {"a": [1, 300, 70_000, 1 << 40], "b": [1, 2, 3, 4], "c": None, "d": {"e": True, "f": "x"}}


def test_the_same_messages_in_every_container() -> None:
    record = one("sglang", "0.5.23", "nixl.registration", "hybrid").record
    frames = [bytes.fromhex(f) for f in record["frames"]]
    stream = b"\xff" + bytes(8) + b"\x7f" + bytes(54) + b"\x04\x05\x05READY"[:2] + b"READY"
    for i, frame in enumerate(frames):
        more = i < len(frames) - 1
        long = len(frame) > 255
        stream += bytes([more | long << 1]) + len(frame).to_bytes(8 if long else 1, "big") + frame
    text = "# a remark\n" + "\n".join(f.hex(" ") or "-" for f in frames) + "\n"
    want = read(messages(json.dumps(record).encode())[0])[0].values
    for data in (stream, text.encode(), text.upper().encode().replace(b"# A", b"# a"), json.dumps([record]).encode()):
        assert read(messages(data)[0])[0].values == want


def test_a_request_of_zeromq_loses_its_empty_frame() -> None:
    record = one("vllm", "0.33.0", "nixl.request", "plain").record
    body = bytes.fromhex(record["frames"][0])
    stream = b"\xff" + bytes(8) + b"\x7f" + bytes(54) + b"\x01\x00" + bytes([0, len(body)]) + body
    assert messages(stream)[0].value == (body,)


def test_two_fleets_are_compared_field_by_field() -> None:
    a = of(lines("sglang", "0.5.16", "mooncake.registration plain"))
    b = of(lines("sglang", "0.5.18", "mooncake.registration plain"))
    found = {d.path: (d.source, d.sink) for d in compare(a, b)}
    assert found["mooncake.registration[12]"] == ("staging_base_ptr u64?, 0.5.16", "dst_kv_layer_ids list<u32>, 0.5.18")
    assert compare(a, a) == []
    nixl = of(lines("sglang", "0.5.16", "nixl.registration plain"))
    assert [d.path for d in compare(a, nixl)] == ["backend"]
    other = of(lines("vllm", "0.32.0", "nixl.reply plain"))
    assert [d.path for d in compare(a, other)] == ["engine"]
    info = one("sglang", "0.5.23", "bootstrap.info", "plain").record["json"]
    two = [
        of(json.dumps({**info, "page_size": n, "kv_cache_dtype": t}).encode()) for n, t in ((16, "auto"), (64, "bf16"))
    ]
    assert [(d.path, d.source, d.sink) for d in compare(*two)] == [("page", "16", "64")]


def test_every_word_of_a_row_is_in_the_list() -> None:
    known = words()["word"]
    used = {row.word for engine in engines().values() for m in engine.messages for row in m.rows if row.word}
    assert used <= known.keys()
    assert {w for w, row in known.items() if row.get("need")} <= {w for w, row in known.items() if "say" in row}
