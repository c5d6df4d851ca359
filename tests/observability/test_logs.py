"""Log records of real Sources and Sinks: their fields, and what is never in them."""

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from kvproto import Cache, Pool, Sink, Source, lay_out, new_ticket
from kvproto import events as told
from kvproto.events import Event
from kvproto.observability.records import RECORDS, shown
from kvproto.session.error_fields import refused
from kvproto.wire import decode, encode
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Refused
from tests.door.doors import GEOMETRY, PAGES, PROMPT, STEPPED, address_in, two

from .test_metrics import ask, connected, failed, of, serve, stranger


@pytest.fixture
def log(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    with caplog.at_level(logging.DEBUG, "kvproto.events"):
        yield caplog


def fields(log: pytest.LogCaptureFixture, event: str) -> list[dict[str, Any]]:
    return [vars(record) for record in log.records if vars(record).get("event") == event]


def test_a_transfer_has_one_name_on_both_sides(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """KVP-SEE-ID."""
    with two(tmp_path, STEPPED) as both:
        found = ask(both)
        both.until(lambda: found.done and of(both, told.Freed))
    name = hashlib.sha256(bytes(found.ticket.key)).digest()[:8].hex()
    [sent], [arrived], [freed] = (fields(log, event) for event in ("sent", "arrived", "freed"))
    assert (sent["transfer"], arrived["transfer"], freed["transfer"]) == (name, name, name)
    assert (sent["engine"], sent["role"], sent["peer"], sent["epoch"]) == ("prefill", "source", "decode rank 0", 1)
    assert (arrived["engine"], arrived["role"], arrived["peer"], arrived["epoch"]) == ("decode", "sink", "prefill", 1)
    assert sent["bytes"] == arrived["bytes"] == 320


def test_what_is_lost_says_why(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    with two(tmp_path, STEPPED) as both:
        failed(both)
    [record] = [r for r in log.records if vars(r).get("event") == "lost"]
    assert (record.levelno, vars(record)["code"], vars(record)["pages_free"]) == (logging.WARNING, "ABORTED", True)
    assert "no memory" in vars(record)["error"]
    assert "lost engine=decode" in record.getMessage()


def test_every_event_has_a_level_and_fields() -> None:
    kinds = {kind for kind in vars(told).values() if isinstance(kind, type) and kind in Event.__args__}
    assert kinds == RECORDS.keys()


def test_what_goes_well_is_not_written_where_nobody_asks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "kvproto.events"), two(tmp_path, STEPPED) as both:
        serve(both)
    assert {record.__dict__["event"] for record in caplog.records} <= {"connected", "disconnected"}


def test_no_secret_is_written(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """KVP-SECRET-LOG: neither ticket keys, nor addresses, nor where memory lies; whatever happens."""
    address = f"ipc://{tmp_path}/prefill"
    with two(tmp_path, STEPPED) as both, stranger(address) as bad:
        serve(both, 2)
        bad.send(b"garbage")
        keys = [bytes(event.request.ticket.key) for event in both.told if isinstance(event, told.Freed)]
        dropped = both.sink.fetch(both.ticket, PROMPT, {"kv": [9, 0, 5]})
        both.until(lambda: of(both, told.ProtocolError))
        dropped.abort(f"{address} is gone")
        both.until(lambda: dropped.done)
        elsewhere = Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"other": address}, STEPPED)
        with elsewhere:  # another engine answers there, which the sink refuses
            lost = elsewhere.fetch(new_ticket("other"), PROMPT, {"kv": [9, 0, 5]})
            both.until(lambda: elsewhere.step(0.001) or lost.done)
            both.until(lambda: elsewhere.step(0.001) or lost.done)
        places = [pool.array("kv", 0, "k").ctypes.data for pool in (both.source.pool, both.sink.pool)]
    keys += [bytes(both.ticket.key), bytes(lost.ticket.key)]
    text = "\n".join(f"{record.getMessage()} {vars(record)}" for record in log.records)
    assert {"sent", "lost", "protocol_error", "refused"} <= {vars(r).get("event") for r in log.records}
    for secret in [*(form for key in keys for form in (key.hex(), repr(key), str(list(key)))), str(tmp_path)]:
        assert secret not in text
    for place in places:
        assert str(place) not in text
        assert f"{place:x}" not in text


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("listens at ipc:///run/kv/p-0: correct the address", "listens at ipc://(hidden): correct the address"),
        ("got tcp://10.0.0.1:8998 (check it)", "got tcp://(hidden) (check it)"),
        ("at tcp://[fd00::1]:8998: refused", "at tcp://(hidden): refused"),
        ("ipc:///a, 'ipc:///b'; (tcp://h:1)", "ipc://(hidden), 'ipc://(hidden)'; (tcp://(hidden))"),
        ("one engine at ipc:///a:", "one engine at ipc://(hidden):"),
    ],
)
def test_an_address_is_hidden_and_the_sentence_stays(text: str, said: str) -> None:
    """KVP-SECRET-LOG."""
    assert shown(text) == said


def test_what_a_peer_says_stays_on_one_line(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """KVP-SEE-TEXT."""
    with two(tmp_path, STEPPED) as both:
        connected(both)
        both.sink.close("bye\n2026-01-01 ERROR root: forged \x1b[2J\u202e" + "x" * 900)
        while not of(both, told.Disconnected):
            both.told += both.source.step(0.005)
    [closed] = [r for r in log.records if vars(r).get("event") == "disconnected"]
    assert closed.getMessage().isprintable()
    assert vars(closed)["reason"].startswith("bye\\n2026")
    assert len(vars(closed)["reason"]) < 500


def test_what_a_peer_says_in_a_refusal_stays_on_one_line() -> None:
    """KVP-SEE-TEXT: engines write the text of an error to logs of their own, and `kvproto` to a terminal."""
    forged = "bye\n2026-01-01 ERROR root: forged \x1b[2J\u202e"
    said = Refused(request=1, code=ErrorCode.BUSY, path=forged, mine=forged, yours=forged, advice=forged)
    error = refused(decode(encode(said)), "prefill rank 0")
    assert str(error).isprintable()
    assert str(error).count("bye\\n2026") == 4


def test_a_peer_cannot_fill_the_disk(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """KVP-SEE-TEXT: a few records a second of what peers do, and how many were left out."""
    seconds = [100.0]
    monkeypatch.setattr("kvproto.observability.records.time.monotonic", lambda: seconds[0])
    with two(tmp_path, STEPPED) as both, stranger(f"ipc://{tmp_path}/prefill") as bad:
        connected(both)
        for number in (300, 301):
            for _ in range(150):
                bad.send(b"garbage")
            both.until(lambda number=number: len(of(both, told.ProtocolError)) >= 150 * (number - 299))
            seconds[0] += 1
    written = fields(log, "protocol_error")
    assert 0 < len(written) <= 40
    assert sum(record.get("left_out", 0) for record in written) > 100


def test_a_log_that_nobody_set_up_is_silent(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with two(tmp_path, STEPPED) as both, stranger(f"ipc://{tmp_path}/prefill") as bad:
        bad.send(b"garbage")
        both.until(lambda: of(both, told.ProtocolError))
    assert capfd.readouterr().err == ""


def test_a_sink_that_can_go_on_no_more_says_so(
    tmp_path: Path, log: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with two(tmp_path, STEPPED) as both:
        connected(both)
        monkeypatch.setattr(both.sink._node, "turn", lambda ready: [][0])
        with pytest.raises(IndexError):
            both.sink.step()
        [record] = fields(log, "failed")
    assert (record["levelname"], record["engine"]) == ("CRITICAL", "decode")
    assert "list index out of range" in record["error"]


def test_a_peer_whose_weights_were_not_compared(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """Two models of one shape would give fluent wrong answers: the event and the log say that nothing told them apart."""
    with two(tmp_path, STEPPED) as both:
        connected(both)
        unsaid = {of(both, told.Connected)[0].unstated}
    assert unsaid == {("weights.target", "tokenizer", "rope.target", "kv_scales.target")}
    for record in fields(log, "connected"):
        assert (record["levelno"], record["not_compared"]) == (logging.WARNING, ", ".join(*unsaid))


def test_a_peer_whose_facts_differ_or_are_all_stated(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    cache = Cache.gqa("kv", 1, kv_heads=1, head_dim=4, page=4)
    facts, address = {"weights.target": "a", "tokenizer": "b", "rope.target": "c"}, address_in(tmp_path)
    for number, (theirs, ours, level) in enumerate((("x", "x", logging.INFO), ("x", "y", logging.WARNING))):
        pools = [Pool.allocate(lay_out([cache], facts=facts, warn={"adapters": said}), 4) for said in (theirs, ours)]
        place = f"{address}{number}"
        with (
            Source("prefill", pools[0], place, STEPPED) as source,
            Sink("decode", pools[1], {"prefill": place}, STEPPED) as sink,
        ):
            while not (fields(log, "connected") and sink.ready):
                source.step(0.001)
                sink.step(0.001)
        [sunk] = [record for record in fields(log, "connected") if record["role"] == "sink"]
        assert (sunk["levelno"], sunk.get("differ"), sunk.get("not_compared")) == (
            level, None if theirs == ours else "facts[adapters] x / y", None,
        )  # fmt: skip
        log.clear()
