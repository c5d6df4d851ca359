"""Every vector of the spec, each way, whole, cut short at every byte, and through a stream cut anywhere."""

import json
import random
from pathlib import Path
from typing import Any

import pytest

from kvproto.errors import WireError
from kvproto.wire import Decoder, decode, decode_struct, encode, encode_struct, explain, from_json, messages, to_json
from kvproto.wire.enums import ErrorCode
from tests.errors import raises

VECTORS = Path(__file__).parents[2] / "spec/v1/vectors"
FILES = sorted(VECTORS.glob("codec/*.json"))


def cases(path: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = json.loads(path.read_text())["cases"]
    return rows


def read(case: dict[str, Any], data: bytes) -> Any:
    return decode_struct(getattr(messages, case["struct"]), data) if "struct" in case else decode(data)


def answer(case: dict[str, Any]) -> dict[str, Any]:
    try:
        value = read(case, bytes.fromhex(case["bytes"]))
    except WireError as error:
        return {"error": error.code.name, "path": error.path}
    return {"name": type(value).__name__, "fields": to_json(value)}


def expected(case: dict[str, Any]) -> dict[str, Any]:
    if "error" in case:
        return {"error": case["error"], "path": case["path"]}
    return {"name": case.get("message") or case.get("struct"), "fields": case["fields"]}


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_reader(path: Path) -> None:
    wrong = [(case["id"], expected(case), answer(case)) for case in cases(path) if answer(case) != expected(case)]
    assert not wrong


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_writer_makes_the_same_bytes(path: Path) -> None:
    for case in cases(path):
        if "fields" in case and case.get("canonical", True):
            value = from_json(getattr(messages, case.get("message") or case["struct"]), case["fields"])
            written = encode_struct(value) if "struct" in case else encode(value)  # type: ignore[arg-type]
            assert written.hex() == case["bytes"], case["id"]


def test_there_are_enough_and_each_has_its_own_name() -> None:
    rows = [(path.name, case) for path in FILES for case in cases(path)]
    assert len(rows) >= 600
    assert sum("error" in case for _, case in rows) >= 0.45 * len(rows)
    assert len({(name, case["id"]) for name, case in rows}) == len(rows)
    assert all(case["note"] for _, case in rows)
    malformed = {code.name for code in ErrorCode if code.error_class == "malformed"}
    assert malformed <= {case.get("error") for _, case in rows}


@pytest.mark.parametrize("path", [p for p in FILES if "-" in p.stem], ids=lambda p: p.stem)
def test_cut_short_at_every_byte(path: Path) -> None:
    """A message cut anywhere is TRUNCATED; a body cut anywhere, with its length mended, is refused or never complete."""
    case = next(c for c in cases(path) if c["id"] == "full")
    data = bytes.fromhex(case["bytes"])
    start = 0 if "struct" in case else 16
    for size in range(start, len(data)):
        if start:
            with raises(WireError, code=ErrorCode.TRUNCATED, path="@length"):
                decode(data[:size])
        mended = data[:size] if not start else data[:12] + (size - 16).to_bytes(4, "little") + data[16:size]
        with pytest.raises(WireError) as caught:
            read(case, mended)
        assert caught.value.code == ErrorCode.TRUNCATED, size


@pytest.mark.parametrize("seed", range(4))
def test_streams_may_be_cut_anywhere(seed: int) -> None:
    """KVP-STREAM-SPLIT, KVP-STREAM-GO-ON: all frames of all files in one stream, but those that break length or magic."""
    rows = [c for p in FILES for c in cases(p) if "struct" not in c and framed(bytes.fromhex(c["bytes"]))]
    dice = random.Random(seed)
    dice.shuffle(rows)
    stream = b"".join(bytes.fromhex(c["bytes"]) for c in rows)
    decoder, got, at = Decoder(), [], 0
    while at < len(stream):
        size = 1 if seed == 0 and at < 20_000 else dice.choice([1, 15, 16, 17, 500, 40_000])
        got += list(decoder.feed(stream[at : at + size]))
        at += size
    decoder.close()
    assert len(got) == len(rows) > 1000
    for case, item in zip(rows, got, strict=True):
        said = (
            {"error": item.code.name, "path": item.path} if isinstance(item, WireError) else {"fields": to_json(item)}
        )
        assert said == {k: case[k] for k in ("error", "path", "fields") if k in case}, case["id"]


def test_a_stream_ends_at_a_bad_magic() -> None:
    """KVP-STREAM-MAGIC: nobody can tell where the next frame begins."""
    good = bytes.fromhex(cases(VECTORS / "codec/0206-DoneAck.json")[0]["bytes"])
    decoder = Decoder()
    first, second = decoder.feed(good + b"X" + good[1:])
    assert not isinstance(first, WireError)
    assert isinstance(second, WireError)
    assert second.code == ErrorCode.BAD_MAGIC
    with raises(WireError, code=ErrorCode.BAD_MAGIC):
        list(decoder.feed(good))


def framed(frame: bytes) -> bool:
    return len(frame) >= 16 and frame[:4] == b"KVPW" and len(frame) == 16 + int.from_bytes(frame[12:16], "little")


def test_every_vector_can_be_explained() -> None:
    for path in FILES:
        for case in cases(path):
            if "struct" not in case:
                *_, verdict = explain(bytes.fromhex(case["bytes"])).splitlines()
                want = f"refused: {case['error']}" if "error" in case else f"{case['message']}: good"
                assert verdict.startswith(want), case["id"]
