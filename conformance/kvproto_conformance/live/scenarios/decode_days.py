"""Sources that keep to the specification on other days: other numbers, orders and ends than the common ones."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable
from typing import Any

from kvproto_conformance.live import world
from kvproto_conformance.live.decode import DecodeRun
from kvproto_conformance.live.scenario import Prompt, scenario
from kvproto_conformance.live.scenarios.decode_hostile import leave
from kvproto_conformance.live.source import Asked, Source

Json = dict[str, Any]
_NUMBERS = "Numbers of the first minutes are small: later ones are cut off, and an answer finds nobody."
_CONTENT = "A digest over tokens that were cut off: a good request is refused, or another's cache is taken for it."
_LOST = "Prefill says no, and decode waits for ever."
_PAGES = "Pages are used again while somebody still writes them: one request reads the cache of another."
_LEAK = "A word of a request that decode has forgotten is not answered: prefill keeps its pages for ever."
_LATER = "A session that is opened again goes on with the numbers of the one before it."


def _begun(run: DecodeRun) -> tuple[Source, Prompt, Asked]:
    """A fetch that the source has accepted; the engine has read that."""
    found = run.begun()
    found[0].ask("Ping", "Pong")
    return found


def _items(asked: Asked) -> set[tuple[str, str]]:
    return {(grant["group"], item) for grant in asked.frame.fields["grants"] for item in grant.get("items", [])}


def _opening(source: Source) -> tuple[Callable[[], Any], ...]:
    return source.welcome, source.describe, source.registered


@scenario("LIVE-331", "a session id of 64 bits, request ids above 2^63 and 2^32, a version of 70,000", "KVP-SES-ID",
          "KVP-SES-ECHO", role="sink", guards=_NUMBERS)  # fmt: skip
def _large_numbers(run: DecodeRun) -> None:
    (source,) = run.source()
    source.version = "70000"
    run.connect(source)
    source.welcome(session=str(secrets.randbits(63) | 1 << 63))
    source.describe()
    source.registered()
    for first in ((1 << 63) + 5, (1 << 32) + 5):
        source.ids = first
        source.ask("Ping", "Pong", clause="KVP-SES-ECHO")
        run.hand_over([source])


@scenario("LIVE-332", "tokens of 1 to 32 bits", "KVP-TKT-CONTENT", role="sink", guards=_CONTENT)
def _tokens(run: DecodeRun) -> None:
    sources = run.ready()
    for low in (0, 200, 65_520, 151_643, 2**32 - 45):
        key = secrets.token_hex(16)
        run.hand_over(sources, Prompt(key[:12], key, [low + i for i in range(45)], {}))


@scenario("LIVE-333", "300 tokens", "KVP-TKT-CONTENT", role="sink", guards=_CONTENT, world="long")
def _long(run: DecodeRun) -> None:
    run.hand_over(run.ready(), run.prompt(300))


@scenario("LIVE-334", "prompts around the length of a ring", "KVP-RULE-BREAK", role="sink", world="hybrid",
          guards="A prompt shorter than a sliding window asks for rows before its first token.")  # fmt: skip
def _short(run: DecodeRun) -> None:
    sources = run.ready()
    for tokens in (1, 5, 7, 8, 9):
        run.hand_over(sources, run.prompt(tokens))


def _prefixes(run: DecodeRun) -> None:
    sources = run.ready()
    for first in (1, 20, 44, 45):
        run.hand_over(sources, run.prompt(45), first)


for _id, _world in (("LIVE-335", "gqa"), ("LIVE-929", "mla"), ("LIVE-930", "hybrid")):
    scenario(_id, f"a prefix of one token, to the middle of a page, of all tokens but one, and of all ({_world})",
             "KVP-GRANT-COUNT", "KVP-GRANT-STATE", role="sink", world=_world,
             guards="One side alone names the page in which a prefix ends.")(_prefixes)  # fmt: skip


@scenario("LIVE-336", "the endpoint that is known is that of the second rank", "KVP-TRN-ALL", role="sink",
          guards="Whoever answers first is taken for rank 0.")  # fmt: skip
def _seed(run: DecodeRun) -> None:
    first, second = run.source(2)
    run.connect(second)
    for each in (second, first):
        each.welcome()
        each.describe()
    for each in (first, second):
        each.registered()
    run.hand_over([first, second])


@scenario("LIVE-337", "sequences of two ranks: 1, 2 and 3 at each", "KVP-TRN-SEQUENCE", "KVP-TRN-SET", role="sink",
          guards="Ranks share a counter: each sees gaps, and refuses what comes after many.")  # fmt: skip
def _sequences(run: DecodeRun) -> None:
    sources = run.ready(2)
    for number in ("1", "2", "3"):
        prompt = run.prompt()
        run.fetch(sources[0], prompt)
        asked = [run.asked(source, prompt) for source in sources]
        said = [each.of["sequence"] for each in asked]
        run.check("sequence", said == [number, number], str(said), "KVP-TRN-SEQUENCE")
        for source, each in list(zip(sources, asked, strict=True))[:: -1 if number == "2" else 1]:
            waiting = run.state(prompt, 0.0)["state"]
            run.check("not before the last rank", waiting == "waiting", waiting, "KVP-TRN-SET")
            run.deliver(source, each, prompt)
        run.arrived(prompt)


def _again(run: DecodeRun) -> None:
    source = run.one()
    run.hand_over([source])
    leave(run, source)
    prompt = run.fetched(source)
    source.ready()
    asked = run.asked(source, prompt)
    run.check("begins anew", asked.of["sequence"] == "1", asked.of["sequence"], "KVP-TRN-SEQUENCE")
    run.delivered(source, asked, prompt)


scenario("LIVE-338", "after a Goodbye of the source, sequences begin anew", "KVP-TRN-SEQUENCE", role="sink",
         guards=_LATER)(_again)  # fmt: skip
scenario("LIVE-339", "after a Goodbye of the source, bytes are counted anew", "KVP-INL-COUNT", role="sink",
         guards=_LATER, transport="INLINE", extensions=("INLINE",))(_again)  # fmt: skip


def _awaited(run: DecodeRun, steps: int) -> tuple[Source, Prompt]:
    """A fetch that waits for a session of which these many steps are done."""
    (source,) = run.source()
    prompt = run.prompt()
    run.connect(source)
    run.fetch(source, prompt)
    for step in _opening(source)[:steps]:
        step()
    return source, prompt


def _ends_early(steps: int) -> Any:
    def script(run: DecodeRun) -> None:
        source, prompt = _awaited(run, steps)
        source.goodbye()
        run.lost(prompt, "PEER_LOST", free=False)
        source.over()

    return script


for _steps, _after in enumerate(("Welcome", "Description", "Registered"), start=1):
    scenario(f"LIVE-{339 + _steps}", f"Goodbye after {_after}", "KVP-SES-LOST", role="sink",
             guards=_LOST)(_ends_early(_steps))  # fmt: skip


def _refused(steps: int, name: str, code: str) -> Any:
    def script(run: DecodeRun) -> None:
        source, prompt = _awaited(run, steps)
        source.reply(source.expect(name), "Refused", code=code, path="", mine="4096", yours="one more")
        run.lost(prompt, code)
        source.silence(0.05)
        source.session = ""

    return script


for _id, _steps, _name, _code in (
    ("LIVE-343", 0, "Hello", "BUSY"), ("LIVE-344", 1, "Describe", "DTYPE_MISMATCH"),
    ("LIVE-345", 2, "Register", "TRANSPORT_FAILED"), ("LIVE-359", 1, "Describe", "LAYOUT_UNSUPPORTED"),
):  # fmt: skip
    scenario(_id, f"{_name} is answered by Refused", "KVP-SES-LOST", role="sink",
             guards=_LOST)(_refused(_steps, _name, _code))  # fmt: skip


@scenario("LIVE-346", "one of two ranks says Goodbye: the other hears Abort", "KVP-SES-LOST", "KVP-END-FAILED",
          role="sink", guards="One rank of prefill ends, and the others write on into pages used again.")  # fmt: skip
def _one_goes(run: DecodeRun) -> None:
    sources, prompt = run.ready(2), run.prompt()
    run.fetch(sources[0], prompt)
    for source in sources:
        run.asked(source, prompt)
    sources[1].goodbye()
    abort = sources[0].expect("Abort", clause="KVP-END-FAILED")
    sources[0].reply(abort, "Drained", proof="PROVEN")
    run.lost(prompt, "PEER_LOST", free=False)


@scenario("LIVE-347", "a Transfer is answered by Failed", "KVP-END-FAILED", role="sink", guards=_LOST)
def _failed(run: DecodeRun) -> None:
    source, prompt = run.fetching()
    asked = source.asked()
    source.reply(asked.frame, "Failed", code="CONTENT_MISMATCH", path="content", mine="another", yours="this one")
    id = asked.frame.fields["request"]
    source.expect("DoneAck", where=lambda f: f["request"] == id, clause="KVP-SES-REPLY")
    source.reply(source.expect("Abort", clause="KVP-END-FAILED"), "Drained", proof="PROVEN")
    run.lost(prompt, "CONTENT_MISMATCH")
    run.hand_over([source])


@scenario("LIVE-348", "Abort of a Transfer that was not answered", "KVP-END-FAILED", role="sink", guards=_PAGES)
def _unanswered(run: DecodeRun) -> None:
    source, prompt = run.fetching()
    asked = source.asked()
    run.engine.ask("abort", id=prompt.id)
    abort = source.expect("Abort", clause="KVP-END-FAILED")
    source.accept(asked)
    source.reply(abort, "Drained", proof="PROVEN")
    run.lost(prompt, "ABORTED")
    run.hand_over([source])


@scenario("LIVE-349", "Done and Failed that cross an Abort, and come again: each is acknowledged", "KVP-SES-REPLY",
          role="sink", guards=_LEAK)  # fmt: skip
def _crossed(run: DecodeRun) -> None:
    source = run.one()
    source.ids = 1 << 20  # a Failed under the id of a Transfer would answer that
    for name in ("Done", "Failed"):
        prompt = run.fetched(source)
        asked = run.asked(source, prompt)
        source.ask("Ping", "Pong")
        source.move(asked, prompt.seed)
        run.engine.ask("abort", id=prompt.id)
        abort = source.expect("Abort", clause="KVP-END-FAILED")
        if name == "Done":
            said = source.done(asked, run.handed(source, prompt), prompt.seed)
        else:
            said = source.fail(asked, "BUSY")
        source.acknowledged(said, "KVP-SES-REPLY")
        source.wire.send(said.raw)
        source.acknowledged(said, "KVP-SES-REPLY")
        source.reply(abort, "Drained", proof="PROVEN")
        run.lost(prompt, "ABORTED")
    run.hand_over([source])


@scenario("LIVE-350", "Done comes again after the request was released", "KVP-SES-REPLY", role="sink", guards=_LEAK)
def _late(run: DecodeRun) -> None:
    source, prompt, asked = _begun(run)
    source.move(asked, prompt.seed)
    done = source.done(asked, run.handed(source, prompt), prompt.seed)
    source.acknowledged(done)
    run.arrived(prompt)
    source.wire.send(done.raw)
    source.acknowledged(done, "KVP-SES-REPLY")
    run.hand_over([source])


@scenario("LIVE-351", "items of which nothing is proven are named to nobody", "KVP-END-REUSE", role="sink",
          guards=_PAGES, maps=True)  # fmt: skip
def _unproven(run: DecodeRun) -> None:
    source, prompt, asked = _begun(run)
    held = _items(asked)
    run.engine.ask("abort", id=prompt.id)
    source.reply(source.expect("Abort", clause="KVP-END-FAILED"), "Drained", proof="UNPROVABLE")
    run.lost(prompt, "ABORTED", free=False)
    before = run.state(prompt, 0.0)
    run.check("not free", before["free"] is False, str(before), "KVP-END-REUSE")
    for released in (False, True):
        if released:
            run.engine.ask("release", id=prompt.id)
        more = [run.prompt() for _ in range(2)]
        for each in more:
            run.fetch(source, each)
        named = [run.asked(source, each) for each in more]
        again = sorted(held & {item for each in named for item in _items(each)})
        run.check("other items", not again, str(again), "KVP-END-REUSE")
        for each, found in zip(more, named, strict=True):
            run.delivered(source, found, each)


@scenario("LIVE-352", "Describe, Register and Abort that are not answered come again", "KVP-SES-RESEND", role="sink",
          guards="One lost frame, and a session is never opened.", slow=True)  # fmt: skip
def _resent(run: DecodeRun) -> None:
    source = run.connected()
    source.welcome()

    def twice(name: str) -> Any:
        first, again = (source.expect(name, clause="KVP-SES-RESEND") for _ in range(2))
        run.check(f"the same {name}", first.fields == again.fields, str(again.fields), "KVP-SES-RESEND")
        return again

    source.heard.insert(0, twice("Describe"))
    source.describe()
    source.heard.insert(0, twice("Register"))
    source.registered()
    prompt = run.fetched(source)
    run.asked(source, prompt)
    run.engine.ask("abort", id=prompt.id)
    source.reply(twice("Abort"), "Drained", proof="PROVEN")
    run.lost(prompt, "ABORTED")


@scenario("LIVE-353", "every answer comes twice", "KVP-SES-ANSWERED", role="sink",
          guards="A copy of an answer is taken for news: the session begins again, or ends.")  # fmt: skip
def _answers_twice(run: DecodeRun) -> None:
    source = run.connected()
    for step, name in zip(_opening(source), ("Welcome", "Description", "Registered"), strict=True):
        step()
        source.wire.send(source.last[name].raw)
    run.hand_over([source])
    heard = [frame.name for frame in source.silence(0.1)]
    run.check("nothing more", not heard, str(heard), "KVP-SES-ANSWERED")


@scenario("LIVE-354", "a change has reached one rank of two: decode waits for the other", "KVP-DSC-RANKS", role="sink",
          guards="Prefill changes its caches rank by rank, and decode gives all of it up in the middle.")  # fmt: skip
def _half_changed(run: DecodeRun) -> None:
    first, second = run.source(2)
    pages, *others = second.geometry["groups"]
    second.geometry = second.geometry | {"groups": [pages | {"rows": str(2 * int(pages["rows"]))}, *others]}
    second.version = "2"
    run.connect(first)
    first.welcome()
    first.describe()
    second.welcome()
    run.fetch(first, run.prompt())
    second.describe()
    heard = []
    for each in (second, first):
        heard += [frame.name for frame in each.silence(0.2, but=("Register",))]
        if each.heard:
            each.registered()
    heard += [frame.name for each in (second, first) for frame in each.silence(0.2)]
    run.check("nothing is refused", not {"Error", "Goodbye"} & {*heard}, str(heard), "KVP-DSC-RANKS")
    run.check("nothing is requested", "Transfer" not in heard, str(heard), "KVP-DSC-RANKS")
    first.session = second.session = ""


@scenario("LIVE-355", "the incarnation is the time at which the run began", "KVP-SES-INCARNATION", role="sink",
          guards="A number that counts from the machine's start: an engine is taken for its own past.")  # fmt: skip
def _incarnation(run: DecodeRun) -> None:
    run.one()
    begin = time.time()
    run.live.restart()
    for each in run.peers:
        each.over()
    source = run.connected()
    began = (int(source.welcome().fields["incarnation"]) >> 20) / 1000
    good = begin - 0.002 <= began <= time.time() + 1
    run.check("upper 44 bits", good, f"{began - begin:g} s after it was started", "KVP-SES-INCARNATION")
    source.session = ""


@scenario("LIVE-357", "ranks that are numbered 3 and 7", "KVP-TRN-ALL", role="sink",
          guards="Endpoints are found by their place in a list: one rank is greeted as another.")  # fmt: skip
def _sparse(run: DecodeRun) -> None:
    geometry = world.mirror(run.live.geometry, 2)
    ranks = [rank | {"rank": number} for rank, number in zip(geometry["ranks"], ("3", "7"), strict=True)]
    made = run.source(2, geometry=geometry | {"ranks": ranks})
    addresses = dict(zip((3, 7), made[0].endpoints.values(), strict=True))
    for source, rank in zip(made, addresses, strict=True):
        source.rank, source.endpoints = rank, addresses
    run.connect(made[0])
    for source in made:
        source.welcome()
        source.describe()
    for source in made:
        source.registered()
    run.hand_over(made)


@scenario("LIVE-358", "a source says Goodbye amid a copy: its items are not free", "KVP-END-REUSE", role="sink",
          guards=_PAGES, maps=True)  # fmt: skip
def _may_write(run: DecodeRun) -> None:
    source, prompt, _ = _begun(run)
    source.goodbye()
    run.lost(prompt, "PEER_LOST", free=False)
    found = run.state(prompt, 0.0)
    run.check("not free", found["free"] is False, str(found), "KVP-END-REUSE")
