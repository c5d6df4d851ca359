"""Sources in a real etcd: found, moved, drained, killed; and what a directory that is down, slow or lying costs."""

import logging
import signal
import subprocess
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import attrs
import pytest

import kvproto
from kvproto.events import Refused
from kvproto_discovery import Registration, Row, read_found
from kvproto_discovery.etcd import text
from kvproto_discovery.places import etcd_of
from kvproto_discovery.rows import write_row
from tests.door.doors import PROMPT, filled

from .members import Member, decode, hand_over, running, source, until

EARLY = kvproto.Options(part_bytes=1, first_part_ratio=0.0)
READY = frozenset({("prefill", 0)})


def test_a_source_that_registers_is_found_and_leaves_when_it_drains(member: Member, tmp_path: Path) -> None:
    with decode(read_found(member.place)) as sink, source(tmp_path) as prefill:
        assert sink.unready == "it is connected to no source"
        registration = Registration(member.etcd, prefill)
        until(lambda: sink.ready == READY)
        ((_, row),) = member.etcd.rows()[0].items()
        assert (row.engine, row.address, row.incarnation) == ("prefill", prefill.address, prefill.incarnation)
        assert (row.state, row.load, len(row.digest or "")) == ("ready", 0, 64)
        hand_over(prefill, sink)
        prefill.drain()
        until(lambda: not member.etcd.rows()[0])
        registration.close()
        prefill.close()
        until(lambda: not sink.sources)


def test_requests_under_way_survive_the_drain_of_their_source(member: Member, tmp_path: Path) -> None:
    """Its row goes at once, which ends no session."""
    found = read_found(member.place)
    with decode(found) as sink, source(tmp_path, options=EARLY) as prefill, closing(Registration(member.etcd, prefill)):
        until(lambda: sink.ready)
        ticket = kvproto.new_ticket("prefill")
        request, fetch = prefill.request(ticket, PROMPT), sink.fetch(ticket, PROMPT, {"kv": [9, 0, 5]})
        request.computed({"kv": [3, 1, 2]}, 8)
        until(lambda: sink.pool.array("kv", 0, "k")[9].any())  # its first pages have come
        prefill.drain()
        until(lambda: not found)
        request.finish({"kv": [3, 1, 2]})
        fetch.wait(30)
        until(lambda: prefill.drained)


def test_a_source_that_is_killed_leaves_when_its_lease_ends(member: Member, tmp_path: Path) -> None:
    """A row without anybody who keeps its lease: etcd removes it, and nobody dials it any more."""
    lease = member.etcd.call("lease/grant", TTL="2")["ID"]
    row = Row(engine="prefill", address=f"ipc://{tmp_path}/prefill")
    name = member.etcd.prefix + "prefill/0/0"
    member.etcd.call("kv/put", key=text(name), value=text(write_row(row)), lease=lease)
    with decode(read_found(member.place)) as sink:
        until(lambda: sink.sources)
        until(lambda: not sink.sources)


def test_a_source_at_another_address_is_followed(member: Member, tmp_path: Path) -> None:
    with decode(read_found(member.place)) as sink:
        for file in ("first", "second", "third"):
            with source(tmp_path, file=file) as prefill, closing(Registration(member.etcd, prefill)):
                until(lambda: sink.ready == READY)
                hand_over(prefill, sink)
            until(lambda: not sink.ready)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_engines_go_on_while_etcd_is_down_or_hangs(
    member: Member, tmp_path: Path, how: signal.Signals, caplog: pytest.LogCaptureFixture
) -> None:
    found = read_found(member.place)
    with decode(found) as sink, source(tmp_path) as prefill, closing(Registration(member.etcd, prefill, lease=3)):
        until(lambda: sink.ready)
        member.signal(how)
        until(lambda: found.why)
        hand_over(prefill, sink)
        assert "1 sources stay" in caplog.text
        member.signal(signal.SIGCONT) if how == signal.SIGSTOP else member.start()
        until(lambda: not found.why)
        until(lambda: member.etcd.rows()[0])  # the lease has ended meanwhile, or not: it is there again
        hand_over(prefill, sink)


def test_rows_that_all_vanish_end_no_session(member: Member, tmp_path: Path) -> None:
    """An etcd that was made anew has none; the source writes its row again."""
    found = read_found(member.place)
    with decode(found) as sink, source(tmp_path) as prefill, closing(Registration(member.etcd, prefill, lease=60)):
        until(lambda: sink.ready)
        member.delete("prefill/0/0")
        until(lambda: not found)
        hand_over(prefill, sink)
        assert sink.ready == READY


def test_a_row_that_lies_about_its_address_takes_no_session_away(member: Member, tmp_path: Path) -> None:
    found = read_found(member.place)
    with (
        decode(found) as sink,
        source(tmp_path) as prefill,
        source(tmp_path, "o", "other") as other,
        closing(Registration(member.etcd, prefill)),
    ):
        until(lambda: sink.ready)
        member.put("prefill/0/0", write_row(Row(engine="prefill", address=other.address, incarnation=1 << 62)))
        until(lambda: found["prefill", 0].address == other.address)
        end = time.monotonic() + 2.5  # longer than dials are apart
        while time.monotonic() < end:
            hand_over(prefill, sink)
        assert sink.ready == READY


def test_the_engine_that_a_row_leads_to_has_to_be_the_one_that_it_names(member: Member, tmp_path: Path) -> None:
    with decode(read_found(member.place)) as sink, source(tmp_path, "other", "other") as other:
        member.put("prefill/0/0", write_row(Row(engine="prefill", address=other.address)))
        events = until(lambda: [event for event in sink.events() if isinstance(event, Refused)])
        assert events[0].error.code.name == "WRONG_PEER"
        assert not sink.ready


def test_a_key_that_is_not_in_source_keys_is_never_dialled(
    member: Member, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "keys").write_text("# of our engines\nAJGuL^3aRJm.=Z*4>K3AD+Rn?gl([[JK?G?&u/0F\n")
    with caplog.at_level(logging.INFO, "kvproto.discovery"):
        found = read_found(member.place, tmp_path / "keys")
        with decode(found) as sink, source(tmp_path) as prefill, closing(Registration(member.etcd, prefill)):
            until(lambda: "not one of source_keys" in caplog.text)
            assert not found
            assert not sink.sources


def test_keys_that_only_the_directory_says_are_believed_and_told_so(
    member: Member, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    row = Row(engine="prefill", address="tcp://127.0.0.1:1", key="AJGuL^3aRJm.=Z*4>K3AD+Rn?gl([[JK?G?&u/0F")
    member.put("prefill/0/0", write_row(row))
    with decode(read_found(member.place)):
        until(lambda: "state them (source_keys)" in caplog.text)


def test_rows_that_nobody_can_read_are_named_and_cost_no_others(
    member: Member, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    good = write_row(Row(engine="prefill", address="ipc:///nowhere"))
    for name, value in (
        ("a/0/0", "no json"), ("b/0/0", "[" * 100000), ("c/0/0", '{"engine": "c", "address": 7}'),
        ("d/0/0", '{"engine": "d", "address": "ipc:///d", "replica": -1}'), ("e/0/0", good), ("f/0/0", "\x00"),
    ):  # fmt: skip
        member.put(name, value)
    member.put("g/0/0", write_row(Row(engine="g", address="no address")))
    found = read_found(member.place)
    with decode(found) as sink, source(tmp_path) as prefill, closing(Registration(member.etcd, prefill)):
        until(lambda: sink.ready == READY)
        until(lambda: "g/0 is not used" in caplog.text)
    for name in "abcdef":
        assert f"{member.etcd.prefix}{name}/0/0" in caplog.text
    assert "the row of" in caplog.text


def test_a_row_that_changes_all_the_time_is_not_dialled_in_a_hurry(
    member: Member, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Each dial waits for twice as long as the one before."""
    found = read_found(member.place)
    with caplog.at_level(logging.INFO, "kvproto.discovery"), decode(found):
        for n in range(10):
            address = f"ipc://{tmp_path}/no-{n}"
            member.put("prefill/0/0", write_row(Row(engine="prefill", address=address)))
            until(lambda address=address: address in [seed.address for seed in found.values()])
    assert "prefill/0 is in the directory" in caplog.text
    assert 1 <= caplog.text.count("prefill/0 has moved") <= 4


def test_of_two_runs_of_one_source_the_later_has_the_row(
    member: Member, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with source(tmp_path, file="old") as old, source(tmp_path, file="new") as new:
        with closing(Registration(member.etcd, new)):
            until(lambda: member.etcd.rows()[0])
            with closing(Registration(member.etcd, old)):
                until(lambda: "a name or a replica of its own" in caplog.text)
                assert member.etcd.rows()[0]["prefill", 0].address == new.address
        with closing(Registration(member.etcd, old)):
            until(lambda: member.etcd.rows()[0])
            with closing(Registration(member.etcd, new)):
                until(lambda: member.etcd.rows()[0]["prefill", 0].address == new.address)


def test_a_row_that_somebody_has_changed_or_removed_is_written_again(member: Member, tmp_path: Path) -> None:
    with source(tmp_path) as prefill, closing(Registration(member.etcd, prefill, lease=1.5)):
        until(lambda: member.etcd.rows()[0])
        member.delete("prefill/0/0")
        until(lambda: member.etcd.rows()[0])
        later = Row(engine="prefill", address="tcp://elsewhere:7100", incarnation=2**63 - 1)
        member.put("prefill/0/0", write_row(later))  # without a lease, so of no run that lives
        until(lambda: member.etcd.rows()[0]["prefill", 0].address == prefill.address)


def test_a_row_of_a_listed_key_leads_to_no_socket_of_this_host(
    member: Member, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Keys protect what is encrypted, and an ipc address is not."""
    key, listed = "AJGuL^3aRJm.=Z*4>K3AD+Rn?gl([[JK?G?&u/0F", tmp_path / "keys"
    listed.write_text(f"{key}\n")
    row = Row(engine="prefill", address=f"ipc://{tmp_path}/control", key=key)
    member.put("prefill/0/0", write_row(row))
    with decode(read_found(member.place, listed)) as sink:
        until(lambda: "its address is not encrypted" in caplog.text)
        assert not sink.sources


def test_a_wildcard_is_no_address_of_a_row(member: Member) -> None:
    options = kvproto.Options(insecure=True)
    with (
        kvproto.Source("prefill", filled(), "tcp://0.0.0.0:0", options) as prefill,
        pytest.raises(kvproto.LocalError, match="advertise"),
    ):
        Registration(member.etcd, prefill)


def test_a_member_that_is_gone_is_passed_over(member: Member, tmp_path: Path) -> None:
    place = member.place.replace("etcd:", "etcd:http://127.0.0.1:9,")
    with decode(read_found(place)) as sink, source(tmp_path) as prefill, closing(Registration(member.etcd, prefill)):
        until(lambda: sink.ready)


def test_a_row_states_how_many_replicas_share_its_name(member: Member, tmp_path: Path) -> None:
    found = read_found(member.place)
    assert found.replicas("prefill") == 1
    with decode(found), source(tmp_path) as prefill, closing(Registration(member.etcd, prefill, replicas=4)):
        until(lambda: found)
        assert found.replicas("prefill") == 4
        assert attrs.asdict(found["prefill", 0]) == {"address": prefill.address, "key": None}


@pytest.mark.parametrize(
    "said", ["", "x", "[]", "7", "{}", '{"header": 7}', '{"header": {"revision": "x"}}', '{"kvs": [7]}']
)
def test_an_answer_that_is_none_of_etcds_ends_nothing(
    tmp_path: Path, said: str, caplog: pytest.LogCaptureFixture
) -> None:
    class Other(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            self.rfile.read(int(self.headers["Content-Length"]))
            self.send_response(200)
            self.end_headers()
            self.wfile.write(said.encode())

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Other) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        place = f"etcd:http://127.0.0.1:{server.server_port}"
        found = read_found(place)
        with decode(found) as sink, source(tmp_path) as prefill, closing(Registration(etcd_of(place), prefill)):
            until(lambda: "does not answer" in caplog.text and "is not in the directory" in caplog.text)
            sink.connect("prefill", address=prefill.address)
            until(lambda: sink.ready)
            hand_over(prefill, sink)
            assert found.why
        server.shutdown()


def test_etcd_with_certificates_on_both_sides(tmp_path: Path) -> None:
    """A client without one, or that trusts another authority, gets no answer."""
    (tmp_path / "own.cnf").write_text("subjectAltName=IP:127.0.0.1\n")
    for arguments in (
        "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout ca.key -out ca.pem -days 2 -subj /CN=ca",
        "req -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -keyout own.key -out own.csr -subj /CN=own",
        "x509 -req -in own.csr -CA ca.pem -CAkey ca.key -CAcreateserial -out own.pem -days 2 -extfile own.cnf",
    ):
        subprocess.run(["openssl", *arguments.split()], cwd=tmp_path, check=True, capture_output=True)
    with running(tmp_path / "etcd", tmp_path) as member:
        with (
            decode(read_found(member.place)) as sink,
            source(tmp_path) as prefill,
            closing(Registration(member.etcd, prefill)),
        ):
            until(lambda: sink.ready)
        for left in ("", f"?ca={tmp_path}/ca.pem"):
            with pytest.raises(kvproto.LocalError, match="an answer to"):
                etcd_of(member.place.partition("?")[0] + left).rows()
