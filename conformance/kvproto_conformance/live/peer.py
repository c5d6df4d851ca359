"""Shared parts of the suite's source and sink: they send and receive messages, and trust nothing."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from kvproto_conformance.claims import extensions_with
from kvproto_conformance.codec import write_frame
from kvproto_conformance.codec.facts import LIMITS, MESSAGES
from kvproto_conformance.live.lax import lax_frame
from kvproto_conformance.live.watch import ENGINE, SUITE, Frame, Watch
from kvproto_conformance.live.wire import Router, Wire

Json = dict[str, Any]
PATIENCE = 10.0
"""Seconds that an answer may take: several times `resend`."""
RESEND = LIMITS["resend"] / 1000


class Missed(Exception):
    """A message that the engine should have sent did not come, or another came."""

    def __init__(self, text: str, clause: str = "") -> None:
        super().__init__(text)
        self.clause = clause


def greased(raw: bytes) -> bytes:
    """The same message with a field that is never assigned (KVP-GREASE-SEND)."""
    if not 0x80 <= raw[16] < 0x8F:
        return raw
    body = bytes([raw[16] + 1]) + raw[17:] + b"\xcd\x80\x1b" + b"\x92\xa6grease\xc3"
    return raw[:12] + len(body).to_bytes(4, "little") + body


class Peer:
    """One end of a session; the engine has the other."""

    def __init__(self, wire: Wire, engine: str) -> None:
        """`engine` is the engine's role."""
        self.wire, self.watch = wire, Watch(engine)
        self.session = ""
        self.ids = 0
        self.answers_pings, self.greases = True, False
        self.incarnation = (int(time.time() * 1000) << 20) + secrets.randbits(20)
        self.heard: list[Frame] = []
        """Frames of the engine that no `expect` has consumed yet."""
        self.last: dict[str, Frame] = {}
        """The latest message of each name that was sent."""
        self.last_heard: dict[str, Frame] = {}
        """The latest message of each name that was received."""
        self._replies: dict[tuple[str, str], bytes] = {}

    def next_id(self) -> str:
        """An unused request id."""
        self.ids += 1
        return str(self.ids)

    def send(self, name: str, **fields: Any) -> Frame:
        """Send a message; `session` is filled in if the message has that field and it is not given."""
        if self.session and "session" in MESSAGES[name].names:
            fields.setdefault("session", self.session)
        raw = write_frame(name, {k: v for k, v in fields.items() if v is not None}, self.watch.minor)
        if self.greases:
            raw = greased(raw)
        frame = self.last[name] = self.watch.see(raw, SUITE)
        self.wire.send(raw)
        return frame

    def reply(self, to: Frame, name: str, **fields: Any) -> None:
        """Answer a request; if the request comes again, so does the answer."""
        stated = {key: to.fields[key] for key in ("request", "sequence") if key in to.fields}
        kept = {key: value for key, value in stated.items() if key in MESSAGES[name].names}
        self._replies[to.name, to.fields["request"]] = self.send(name, **kept, **fields).raw

    def misbehave(self, what: str, raw: bytes, *more: bytes) -> None:
        """Send something that breaks a rule on purpose, so that it does not count as the suite's fault."""
        self.watch.bad(raw, what)
        self.wire.send(raw, *more)

    def misstate(self, name: str, **fields: Any) -> str:
        """Send a message whose content or timing breaks a rule; returns its request id."""
        for key in ("session", "request"):
            if key in MESSAGES[name].names and MESSAGES[name].names[key].required and key not in fields:
                fields[key] = self.session if key == "session" else self.next_id()
        self.misbehave(name, lax_frame(name, fields))
        return str(fields.get("request", ""))

    def misplaced(self, name: str, *by: str, clause: str, **fields: Any) -> Frame | None:
        """The refusal, `by` one of these messages, of a message that is not due.

        None if nothing answers a message of an extension: a reader without it does not know the type
        (KVP-VER-EXTENSION), nor whether it is a request's.
        """
        id = self.misstate(name, **fields)
        if not extensions_with(name):
            return self.expect(*by, where=lambda f: f.get("request", id) == id, seconds=6.0, clause=clause)
        self.ask("Ping", "Pong", clause="KVP-ERR-ALONE")
        answers = [frame for frame in self.heard if frame.name in by and frame.fields.get("request", id) == id]
        self.heard = [frame for frame in self.heard if frame not in answers[:1]]
        return answers[0] if answers else None

    def hear(self, seconds: float) -> Frame | None:
        """The next frame, after answering Pings and requests that were answered before."""
        end = time.monotonic() + seconds
        while (raw := self.wire.receive(end - time.monotonic())) is not None:
            frame = self.watch.see(raw, ENGINE)
            self.last_heard[frame.name] = frame
            if frame.name == "Ping" and self.answers_pings and "session" in frame.fields and self.session:
                self.reply(frame, "Pong")
                continue
            if frame.name == "Goodbye":
                self._replies.clear()
                self.watch.restart()
            if self.watch.is_late(frame):
                if self.session and isinstance(self.wire, Router):
                    self.wire.turn_back()  # it may have come over the connection of the session that is over
                return frame
            answer = self._replies.get((frame.name, str(frame.fields.get("request"))))
            if answer is None:
                return frame
            self.watch.see(answer, SUITE)
            self.wire.send(answer)
        return None

    def expect(
        self, *names: str, where: Callable[[Json], bool] = lambda fields: True, seconds: float = PATIENCE,
        again: Frame | None = None, clause: str = "",
    ) -> Frame:  # fmt: skip
        """The first frame of these names; `again` is sent until then (KVP-SES-RESEND). Raises Missed."""
        for i, frame in enumerate(self.heard):
            if frame.name in names and where(frame.fields):
                return self.heard.pop(i)
        end, resend = time.monotonic() + seconds, time.monotonic() + RESEND
        while (left := end - time.monotonic()) > 0:
            frame_ = self.hear(min(left, max(resend - time.monotonic(), 0)) if again else left)
            if frame_ is None:
                if again is not None and time.monotonic() >= resend:
                    self.watch.see(again.raw, SUITE)
                    self.wire.send(again.raw)
                    resend = time.monotonic() + RESEND
                continue
            if frame_.name in names and where(frame_.fields):
                return frame_
            if again is not None and _refuses(frame_, again):
                text = f"{again.name} was refused: {frame_.fields['code']} at {frame_.fields['path']!r}"
                raise Missed(f"{text}, {frame_.fields['mine']!r} and {frame_.fields['yours']!r}", clause)
            self.heard.append(frame_)
        came = ", ".join(frame.name for frame in self.heard) or "nothing"
        raise Missed(f"{' or '.join(names)} has not come for {seconds:g} s; {came} has", clause)

    def ask(self, name: str, *answers: str, clause: str = "", **fields: Any) -> Frame:
        """Send a request and return its answer."""
        sent = self.send(name, request=self.next_id(), **fields)
        id = sent.fields["request"]
        return self.expect(*answers, where=lambda f: f["request"] == id, again=sent, clause=clause)

    def silence(self, seconds: float, but: tuple[str, ...] = ()) -> list[Frame]:
        """Frames received within this time, except for those of these names; a sink may send Credit at any time."""
        end, found = time.monotonic() + seconds, list(self.heard)
        while (left := end - time.monotonic()) > 0:
            frame = self.hear(left)
            if frame is not None:
                found.append(frame)
        kept = ("Credit", *but)
        self.heard = [frame for frame in found if frame.name in kept]
        return [frame for frame in found if frame.name not in kept]

    def over(self) -> None:
        """Note that the session has ended; the next message on this connection begins another."""
        self.session = ""
        self.watch.restart()
        self.heard.clear()
        self._replies.clear()

    def goodbye(self, reason: str = "over") -> None:
        """End the session in order, if there is one."""
        if self.session and self.watch.state not in ("idle", "greeted", "closed"):
            self.send("Goodbye", reason=reason)

    def close(self) -> None:
        """Say Goodbye, and close the connection."""
        self.goodbye()
        self.wire.close()


def _refuses(frame: Frame, request: Frame) -> bool:
    refusals = ("Refused", "Failed", "Error")
    return frame.name in refusals and frame.fields.get("request") == request.fields.get("request")
