"""Watches all frames of a rank pair, which must be strict and legal; the sender is blamed, engine or suite."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any, NamedTuple

from kvproto_conformance.codec import Refusal, read_frame
from kvproto_conformance.codec.facts import FROZEN_MAJOR, MESSAGES
from kvproto_conformance.data import REGISTRY

Json = dict[str, Any]
ENGINE, SUITE = "engine", "suite"
_facts = json.loads(REGISTRY.read_text(encoding="utf-8"))
_MACHINES: Json = _facts["machine"]
_MESSAGES: Json = _facts["message"]


class Blamed(Exception):
    """One of the two has broken a rule."""

    def __init__(self, who: str, text: str, clause: str) -> None:
        super().__init__(text)
        self.who, self.clause = who, clause


class Frame(NamedTuple):
    """One message."""

    name: str
    fields: Json
    raw: bytes
    sender: str
    at: float
    """By time.monotonic."""


def _rows(machine: str) -> dict[tuple[str, str], tuple[str, list[str]]]:
    found = {}
    stated = _MACHINES[machine]
    states = {state["name"]: state.get("feature", []) for state in stated["state"]}
    for move in stated["move"]:
        for name, needed in states.items():
            if move["from"] == name or (move["from"] == "*" and name not in move.get("but", [])):
                to = name if move["to"] == "same" else move["to"]
                own = _MESSAGES[move["message"]].get("feature", [])
                found[name, move["message"]] = to, move.get("feature") or needed or own
    return found


_SESSION, _TRANSFER = _rows("session"), _rows("transfer")
_OF_TRANSFER = {message for _, message in _TRANSFER} - {"Error"}


class Watch:
    """The messages that one connection has carried, and the resulting state; `engine` is the engine's role."""

    def __init__(self, engine: str) -> None:
        self.log: list[tuple[float, str, str, Json | str]] = []
        """Seconds, sender, message, and fields or raw bytes in hex."""
        self._engine, self._begin = engine, time.monotonic()
        self.session: str | None = None
        self._over: set[str] = set()
        """Ids of the sessions that were before."""
        self.restart()

    def restart(self) -> None:
        """Watch for another session; the log goes on."""
        if self.session is not None:
            self._over.add(self.session)
        self.session = None
        self.minor = 0
        """The minor version of the session."""
        self.most = 0
        """The longest body that the suite accepts, in bytes; 0 until it has stated that."""
        self.features: set[str] = set()
        self.state = "idle"
        self._left = ""
        """The state in which the suite has said Goodbye."""
        self.transfers: dict[tuple[str, str], str] = {}
        self._requests: dict[tuple[str, str], Frame] = {}
        self._answered: dict[tuple[str, str], str] = {}
        self._lies: set[tuple[str, str]] = set()
        self._again: set[tuple[str, str]] = set()
        """Requests that were sent more than once."""

    def bad(self, raw: bytes, what: str) -> None:
        """Log what breaks a rule on purpose: nobody is blamed, and it makes a transition only if that is legal."""
        try:
            self.see(raw, SUITE)
            return
        except Blamed:
            self.log.append((time.monotonic() - self._begin, SUITE, f"misbehaviour: {what}", raw[:4096].hex()))
        with contextlib.suppress(Refusal):
            name, fields = read_frame(raw)
            if _MESSAGES[name]["delivery"] == "request":
                key = SUITE, fields["request"]
                self._requests[key] = Frame(name, fields, raw, SUITE, time.monotonic())
                self._lies.add(key)

    def see(self, raw: bytes, sender: str) -> Frame:
        """Take a frame of a sender; raises Blamed."""
        now = time.monotonic()
        try:
            name, fields = read_frame(raw)
        except Refusal as refusal:
            self.log.append((now - self._begin, sender, "?", raw.hex()))
            raise Blamed(sender, f"a frame that a strict reader refuses: {refusal}", "KVP-BODY-W-FORM") from None
        self.log.append((now - self._begin, sender, name, fields))
        frame = Frame(name, fields, raw, sender, now)
        if self.is_late(frame):
            return frame
        self._check_envelope(frame)
        self._check_sender(frame)
        if not self._check_ids(frame):
            self._move(frame)
        return frame

    def is_late(self, frame: Frame) -> bool:
        """Whether this is an Abort by which the engine goes on to ask for proof of a session that is over."""
        return frame.name == "Abort" and frame.sender == ENGINE and frame.fields["session"] in self._over

    def _check_envelope(self, frame: Frame) -> None:
        if frame.sender == SUITE and "limits" in frame.fields:
            self.most = int(frame.fields["limits"]["max_body"])
        if frame.sender == ENGINE and 0 < self.most < len(frame.raw) - 16:
            text = f"{frame.name} with a body of {len(frame.raw) - 16} bytes, where {self.most} are taken"
            raise Blamed(frame.sender, text, "KVP-FRAME-W-LENGTH")
        minor = 0 if MESSAGES[frame.name].major == FROZEN_MAJOR else self.minor
        if frame.raw[5] != minor:
            raise Blamed(frame.sender, f"{frame.name} of minor {frame.raw[5]}, not {minor}", "KVP-FRAME-W-MAJOR")
        if frame.raw[8:12] != bytes(4):
            raise Blamed(frame.sender, f"{frame.name} with flags that are not 0", "KVP-FRAME-W-ZERO")

    def _check_sender(self, frame: Frame) -> None:
        role = _MESSAGES[frame.name]["sender"]
        mine = self._engine if frame.sender == ENGINE else {"source": "sink", "sink": "source"}[self._engine]
        if role not in ("both", mine):
            raise Blamed(frame.sender, f"{frame.name} from a {mine}", "KVP-SES-STATE")
        stated = frame.fields.get("session")
        if frame.name == "Welcome":
            if self.session is None:
                self.session, self.features = stated, {str(f) for f in frame.fields["features"]}
                self.minor = int(frame.fields["version"]["minor"])
        elif "session" in MESSAGES[frame.name].names and MESSAGES[frame.name].names["session"].required:
            if stated != self.session:
                raise Blamed(frame.sender, f"{frame.name} of session {stated}, not {self.session}", "KVP-SES-ID")
        elif frame.name == "Refused" and stated is not None and stated != self.session:
            raise Blamed(frame.sender, f"Refused of session {stated}, not {self.session}", "KVP-SES-ID")

    def _check_ids(self, frame: Frame) -> bool:
        """Whether this is a request or a reply that was seen before, which makes no transition."""
        if frame.name == "Error" or "request" not in frame.fields:
            return False
        id, kind = frame.fields["request"], _MESSAGES[frame.name]["delivery"]
        other = SUITE if frame.sender == ENGINE else ENGINE
        asked = self._requests.get((other, id))
        failed = self._requests.get((other, f"failed {id}"))
        if frame.name == "DoneAck" and failed is not None and _sequence(failed) == _sequence(frame):
            asked = failed  # a Failed that answers a Transfer has the id of that
        answers = asked is not None and frame.name in _MESSAGES[asked.name]["reply"]
        if kind == "reply" or (frame.name == "Failed" and answers):
            if asked is None or not answers:
                text = f"{frame.name} answers request {id}, which is no request that it answers"
                raise Blamed(frame.sender, text, "KVP-SES-ECHO")
            if _sequence(frame) != _sequence(asked):
                raise Blamed(frame.sender, f"{frame.name} of another sequence than its request", "KVP-SES-ECHO")
            if frame.name == "Failed":
                self._requests.setdefault((frame.sender, f"failed {id}"), frame)
                if (other, id) in self._lies:
                    self._lies.add((frame.sender, f"failed {id}"))
            said = self._answered.get((other, id))
            if (frame.sender, frame.name, said) == (ENGINE, "Failed", "Accepted") and (other, id) not in self._again:
                text = f"Failed under request id {id}, which is that of a {asked.name} that was accepted"
                raise Blamed(frame.sender, text, "KVP-SES-REQUEST-ID")
            before = said == frame.name
            self._answered[other, id] = frame.name
            key = f"failed {id}" if asked is failed and failed is not None else id
            return before or (other, key) in self._lies
        earlier = self._requests.get((frame.sender, id))
        if earlier is not None and (earlier.name, _same(earlier)) != (frame.name, _same(frame)):
            text = f"{frame.name} under request id {id}, which {earlier.name} has used"
            raise Blamed(frame.sender, text, "KVP-SES-REQUEST-ID")
        self._requests[frame.sender, id] = frame
        if earlier is not None:
            self._again.add((frame.sender, id))
        return earlier is not None

    def _move(self, frame: Frame) -> None:
        if frame.name == "Error":
            return
        if frame.name in _OF_TRANSFER:
            key = frame.fields["sequence"]
            self.transfers[key] = self._next(_TRANSFER, self.transfers.get(key, "new"), frame)
        elif not self._crosses(frame):
            self._left = self.state if (frame.name, frame.sender) == ("Goodbye", SUITE) else ""
            self.state = self._next(_SESSION, self.state, frame)

    def _crosses(self, frame: Frame) -> bool:
        """Whether this was perhaps sent before the suite's Goodbye was read, and would have moved nothing then."""
        before = _SESSION.get((self._left, frame.name), ("", []))[0]
        return frame.sender == ENGINE and self.state == "closed" and before == self._left != ""

    def _next(self, rows: dict[tuple[str, str], tuple[str, list[str]]], state: str, frame: Frame) -> str:
        to, needed = rows.get((state, frame.name), (None, []))
        if to is None:
            raise Blamed(frame.sender, f"{frame.name} in state {state}", "KVP-SES-STATE")
        if needed and not self.features & set(needed):
            text = f"{frame.name} in state {state} without {' or '.join(needed)}"
            raise Blamed(frame.sender, text, "KVP-NEG-UNUSED")
        return to


def _sequence(frame: Frame) -> Any:
    return frame.fields.get("sequence")


def _same(frame: Frame) -> Json:
    """Fields that a repeated request has in common with the first: all except how long a lease still lasts."""
    return {k: v for k, v in frame.fields.items() if k != "lease"}
