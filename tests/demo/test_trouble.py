"""Engines that are killed, stopped, drained and started again in the middle of their work."""

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from kvproto import new_ticket, write_ticket
from kvproto.session.limits import PING_SILENCE
from kvproto_reference.demo.control import Line
from kvproto_reference.demo.network import key_folders
from tests.demo.test_by_hand import Start, folder, free_port, start
from tests.demo.test_demo import TEXT, demo, nothing_is_left_behind, prompts, report
from tests.processes import Ended

__all__ = ["folder", "nothing_is_left_behind", "prompts", "start"]
ALL_WELL = {"requests": True, "checksums": True, "tokens": True, "acceptance": True}
LONG = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do"


def between_hosts(*args: object) -> Ended:
    """The demo in two network namespaces, or on loopback where there are none; which of them, it says itself."""
    result = demo("--namespaces", *args)
    if "no network namespaces here" in result.said:
        print(result.said)
        result = demo("--tcp", *args)
    return result


def test_prefill_is_killed_in_the_middle_and_comes_back(prompts: Path) -> None:
    """KVP-NET-CURVE, KVP-REG-DEATH: what is lost is asked again, decode is not started again, all tokens are the same."""
    prompts.write_text("\n\n".join([LONG, *TEXT.split("\n\n")]))
    result = between_hosts(
        "--kill", "--transport", "inline", "--prefill-tp", "1", "--prompt-file", prompts, "--json", "--max-new", "8"
    )
    told = report(result)
    assert told["verdicts"] == {**ALL_WELL, "kill": True}, result.said
    assert any("PEER_LOST" in why for request in told["requests"] for why in request["lost"])
    notes = [text for _, text in told["notes"]]
    assert [note for note in notes if "decode" in note and "gone" in note] == []
    for word in ("is killed (SIGKILL)", "started again", "asked again, with a new ticket", "has its first token"):
        assert any(word in note for note in notes), notes


def test_prompts_that_are_over_before_prefill_is_killed_are_asked_again(prompts: Path) -> None:
    """Of so short ones the next may be caught under way; whoever is never quick enough is told what to do."""
    prompts.write_text("Hi")
    result = demo("--kill", "--prefill-tp", "1", "--prompt-file", prompts, "--json", "--max-new", "1")
    if "give longer prompts" not in result.said:
        assert report(result)["verdicts"] == {**ALL_WELL, "kill": True}, result.said


def test_prefill_drains_and_is_upgraded(prompts: Path) -> None:
    """KVP-SES-DRAINING: it ends with status 0 and has lost nothing; what it refused is served by its successor."""
    prompts.write_text("\n\n".join([LONG, *TEXT.split("\n\n")]))
    result = demo("--drain", "--prefill-tp", "2", "--prompt-file", prompts, "--json", "--max-new", "8")
    told = report(result)
    assert told["verdicts"] == {**ALL_WELL, "drain": True}, result.said
    assert all("DRAINING" in why for request in told["requests"] for why in request["lost"])
    assert any("prefill-0 has ended with status 0" in text for _, text in told["notes"])


def test_prefill_sleeps_and_wakes_with_other_memory(prompts: Path) -> None:
    """KVP-EPO-MOVED: requests of the old memory are asked again, sessions go on, and all tokens are the same."""
    prompts.write_text("\n\n".join([LONG, *TEXT.split("\n\n")]))
    result = demo("--sleep", "--prefill-tp", "1", "--prompt-file", prompts, "--json", "--max-new", "8")
    told = report(result)
    assert told["verdicts"] == {**ALL_WELL, "sleep": True}, result.said
    notes = [text for _, text in told["notes"]]
    assert any("told to sleep" in note for note in notes), notes
    assert [note for note in notes if "gone" in note] == []


class Desk:
    """A router's two lines, by hand."""

    def __init__(self, folder: Path) -> None:
        self.lines = {role: Line(folder, f"{role}-0") for role in ("prefill", "decode")}
        self.said: list[tuple[str, dict[str, Any]]] = []

    def until(self, found: Callable[[str, dict[str, Any]], bool]) -> dict[str, Any]:
        """The first word for which this holds; those before it are forgotten."""
        end = time.monotonic() + 60
        while time.monotonic() < end:
            while self.said:
                role, word = self.said.pop(0)
                if found(role, word):
                    return word
            for role, line in self.lines.items():
                line.socket.poll(20)
                self.said += [(role, word) for word in line.receive()]
        raise AssertionError("it was never said")

    def connected(self, *roles: str) -> None:
        """Until these engines, both by default, say that they are ready, decode for requests of this prefill."""
        left = set(roles or self.lines)

        def ready(role: str, word: dict[str, Any]) -> bool:
            if word["op"] == "ready" and (role == "prefill" or word["sources"] == [0]):
                left.discard(role)
            return not left

        self.until(ready)

    def ask(self, id: str, text: str, max_new: int = 4) -> None:
        ticket = write_ticket(new_ticket("prefill"))
        body = {"id": id, "ticket": ticket, "prompt": list(text.encode()), "max_new": max_new}
        for op, line in self.lines.items():
            line.send(op, **body)

    def close(self) -> None:
        for line in self.lines.values():
            line.close()


@pytest.fixture
def desk(folder: Path) -> Iterator[Desk]:
    with contextlib.closing(Desk(folder)) as made:
        yield made


def test_prefill_is_silent_then_dead_then_back(start: Start, folder: Path, prompts: Path, desk: Desk) -> None:
    """KVP-SES-SUSPECT: suspect within two heartbeats; after its death and restart requests flow, decode runs on.

    The words about requests of a router that went away puzzle the next one no more.
    """
    source = start("prefill", "--dir", folder)
    sink = start("decode", "--dir", folder)
    desk.connected()
    os.kill(source.pid, signal.SIGSTOP)
    stopped = time.monotonic()
    desk.until(lambda role, word: word["op"] == "peer" and word["event"] == "suspected")
    assert time.monotonic() - stopped <= 2 * PING_SILENCE + 10
    os.kill(source.pid, signal.SIGKILL)
    desk.until(lambda role, word: word["op"] == "peer" and word["event"] == "gone")
    start("prefill", "--dir", folder)
    desk.connected()
    desk.ask("of a router that went away", LONG)
    result = demo("--attach", folder, "--prompt-file", prompts, "--json", "--max-new", "8")
    assert report(result)["identical"], result.said
    assert sink.process.exitcode is None


def test_a_key_is_revoked_and_let_in_again(start: Start, folder: Path, tmp_path: Path, desk: Desk) -> None:
    """KVP-NET-REVOKE: decode runs on, and fetches again once it is on the list; a file says where its source is."""
    ours, theirs = key_folders(tmp_path)
    address, allow, seeds = f"tcp://127.0.0.1:{free_port()}", ours / "allow.toml", tmp_path / "sources.toml"
    key = (ours / "public.key").read_text().strip()
    seeds.write_text(f'[[source]]\nengine = "prefill"\naddress = "{address}"\nkey = "{key}"\n')
    start("prefill", "--dir", folder, "--prefill", address, "--keys", ours)
    sink = start("decode", "--dir", folder, "--seeds", seeds, "--keys", theirs)
    desk.connected()
    listed = allow.read_text()
    allow.write_text("")
    desk.until(lambda role, word: word["op"] == "peer" and "NOT_ALLOWED" in word.get("error", ""))
    ours_now = f"{address} has an allow-list without this key, decode has {(theirs / 'public.key').read_text().strip()}"
    desk.until(lambda role, word: word["op"] == "peer" and ours_now in word.get("error", ""))
    allow.write_text(listed)
    desk.connected("decode")
    desk.ask("again", "Alice")
    desk.until(lambda role, word: word["op"] == "arrived" and word["id"] == "again")
    assert sink.process.exitcode is None


def test_a_request_is_dropped_while_it_is_decoded(start: Start, folder: Path, desk: Desk) -> None:
    """Its pages are free at once, and the next request is served."""
    for role in ("prefill", "decode"):
        start(role, "--dir", folder)
    desk.connected()
    desk.ask("unwanted", LONG, max_new=400)
    desk.until(lambda role, word: word["op"] == "tokens" and word["id"] == "unwanted")
    desk.lines["decode"].send("drop", id="unwanted")
    word = desk.until(lambda role, word: word["op"] in ("dropped", "finished") and word["id"] == "unwanted")
    assert (word["op"], word["available"]) == ("dropped", [160, 160])
    desk.ask("next", "Alice")
    desk.until(lambda role, word: word["op"] == "finished" and word["id"] == "next")


def test_both_engines_are_told_to_sleep_by_their_sockets(start: Start, folder: Path, desk: Desk) -> None:
    """KVP-EPO-FREE: decode ends what it decodes first; both wake with other memory, and requests flow."""
    for role in ("prefill", "decode"):
        start(role, "--dir", folder)
    desk.connected()
    desk.ask("before", "Alice")
    desk.until(lambda role, word: word["op"] == "arrived" and word["id"] == "before")
    for role, line in desk.lines.items():
        line.send("sleep")
        desk.until(lambda said_by, word, role=role: (said_by, word["op"]) == (role, "woke"))
    desk.ask("after", "Alice")
    desk.until(lambda role, word: word["op"] == "finished" and word["id"] == "after")


def asked_to_end(sink: Any, source: Any, desk: Desk) -> Any:
    """The sink, when one request has arrived and its source is told to end in the middle of another."""
    desk.connected()
    desk.ask("short", "Alice")
    desk.ask("long", 8 * LONG)
    desk.until(lambda role, word: word["op"] == "arrived" and word["id"] == "short")
    os.kill(source.pid, signal.SIGTERM)
    return sink


def test_a_drain_has_an_end(start: Start, folder: Path, desk: Desk) -> None:
    """What takes longer is lost and said; decode drains too, and what it decodes is finished first."""
    source = start("prefill", "--dir", folder, "--chunk", "1", "--drain-for", "0.01")
    sink = asked_to_end(start("decode", "--dir", folder), source, desk)
    desk.until(lambda role, word: word["op"] == "failed" and (word["id"], word["code"]) == ("long", "PEER_LOST"))
    status, _, said = source.wait(20)
    assert (status, "not drained after 0.01 s" in said) == (1, True)
    os.kill(sink.pid, signal.SIGTERM)
    desk.until(lambda role, word: role == "decode" and word["op"] == "lost")
    assert sink.wait(20).status == 0


def test_a_second_sigterm_ends_an_engine_at_once(start: Start, folder: Path, desk: Desk) -> None:
    source = start("prefill", "--dir", folder, "--chunk", "1")
    sink = asked_to_end(start("decode", "--dir", folder), source, desk)
    desk.until(lambda role, word: word["op"] == "draining")
    os.kill(source.pid, signal.SIGTERM)
    assert source.wait(20).status == 143
    desk.until(lambda role, word: word["op"] == "failed" and word["id"] == "long")
    assert psutil.Process(sink.pid).is_running()
