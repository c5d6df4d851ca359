"""Cases of two engines that hand prompts over to each other: each yields what differs."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

from kvproto import new_ticket, write_ticket
from tools.engines.vllm_engine import ASK, DEADLINE, UNZEROED, Engine, new_name, over, prompts
from tools.engines.vllm_models import make_adapter

Case = Callable[[Engine, Engine], Iterator[str]]
ADAPTERS = "law", "taxes"
"""LoRA adapters of a model, by name."""
PIECE = 128
"""Tokens of a chunk, where two engines are to compute a prompt in the same pieces."""
_SOON = 8.0
"""Seconds in which a request whose prefill engine died is over."""
_PROMPT_WAIT, _SOURCE_WAIT = 10.0, 5.0
"""Seconds: a source waits so long for the prompt of a ticket, and a sink for a source, before each gives up."""


def same_tokens(one: Engine, two: Engine) -> Iterator[str]:
    """Several prompts at once, each way: fetched whole, and the tokens are those of the prefill engine alone."""
    for seed, (prefill, decode) in enumerate(((one, two), (two, one))):
        texts = prompts(4, 40, 200, seed)
        alone = [prefill.run(new_name(), text, 16)[0] for text in texts]
        first = [new_name() for _ in texts]
        for request, text in zip(first, texts, strict=True):
            prefill.add(request, text, 1, ASK)
        params = [prefill.result(request)[2] for request in first]
        if prefill.free()[1] != len(texts):
            yield f"{prefill.name} does not hold its requests' blocks"
        second = [new_name() for _ in texts]
        for request, text, ticket in zip(second, texts, params, strict=True):
            decode.add(request, text, 16, ticket)
        for i, request in enumerate(second):
            tokens, reason, _, _ = decode.result(request)
            if (tokens, reason, request in decode.fetched) != (alone[i], "length", True):
                yield f"{prefill.name} to {decode.name}, prompt {i}: {tokens}, {reason}, not {alone[i]}, or not fetched"


def same_pieces(one: Engine, two: Engine) -> Iterator[str]:
    """Of chunks of PIECE tokens the last is the prompt's last token, which is what decode computes: a prompt at a time, so
    that both compute the same pieces, and all tokens are equal though they are rounded to 8 bits.
    """
    for prefill, decode in ((one, two), (two, one)):
        for i, tokens in enumerate((PIECE, 2 * PIECE, 3 * PIECE)):
            (prompt,), name = prompts(1, tokens + 1, tokens + 2, i), new_name()
            alone, found = prefill.run(new_name(), prompt, 32)[0], over(prefill, decode, prompt, 32, name)[0]
            if found != alone or name not in decode.fetched:
                yield f"{prefill.name} to {decode.name}, prompt {i}: {found}, not {alone}, or not fetched"


def one_bit(one: Engine, two: Engine) -> Iterator[str]:
    """A bit of a page that arrived is flipped: other tokens."""
    (prompt,) = prompts(1, 100, 101, 1)
    name = f"corrupt-{new_name()}"
    bad = over(one, two, prompt, name=name)[0]
    good = one.run(new_name(), prompt, 16)[0]
    if good == bad or name not in two.fetched:
        yield "the same tokens, or none fetched: the pages were not used"


def one_state_bit(one: Engine, two: Engine) -> Iterator[str]:
    """A bit of a state that arrived is flipped, and none of a page: other tokens."""
    (prompt,) = prompts(1, 100, 101, 1)
    name = f"corrupt-state-{new_name()}"
    bad = over(one, two, prompt, name=name)[0]
    if one.run(new_name(), prompt, 16)[0] == bad or name not in two.fetched:
        yield "the same tokens, or none fetched: the states were not used"


def rows_behind(one: Engine, two: Engine) -> Iterator[str]:
    """Free blocks hold what is no number: the engine zeroes those that it loads into, and where it does not, other tokens."""
    (prompt,) = prompts(1, 100, 101, 1)
    alone = one.run(new_name(), prompt, 16)[0]
    for zeroed in (True, False):
        name = new_name() if zeroed else f"{UNZEROED}-{new_name()}"
        two.spoil()
        if (over(one, two, prompt, name=name)[0] == alone) != zeroed or name not in two.fetched:
            yield f"{'other' if zeroed else 'the same'} tokens, or none fetched"


def ticket_beforehand(one: Engine, two: Engine) -> Iterator[str]:
    """Both engines are asked at once, with a ticket that a router made; and decode before prefill."""
    (prompt,) = prompts(1, 300, 301, 2)
    alone = two.run(new_name(), prompt, 16)[0]
    for order in ((one, two), (two, one)):
        ticket, names = write_ticket(new_ticket(one.name, deadline=120)), {}
        for engine in order:
            names[engine.name] = new_name()
            params = {"do_remote_decode": True} if engine is one else {"do_remote_prefill": True}
            engine.add(names[engine.name], prompt, 1 if engine is one else 16, params | {"ticket": ticket})
        tokens = two.result(names[two.name])[0]
        one.result(names[one.name])
        if tokens != alone:
            yield f"{[engine.name for engine in order]}: {tokens}, not {alone}"


def aborts(one: Engine, two: Engine) -> Iterator[str]:
    """Requests are aborted at each engine, before and after the other was asked; the next is served."""
    (prompt,) = prompts(1, 200, 201, 3)
    prefill = new_name()
    one.add(prefill, prompt, 1, ASK)
    one.abort(prefill)  # before it is scheduled, or while it is computed
    params = one.run(new_name(), prompt, 1, ASK)[2]
    for _ in range(2):  # the second time the ticket was used
        decode = new_name()
        two.add(decode, prompt, 16, params)
        two.abort(decode)
    ticket = {"ticket": write_ticket(new_ticket(one.name, deadline=30))}
    waiting = new_name()
    two.add(waiting, prompt, 16, {"do_remote_prefill": True} | ticket)  # its prefill never comes
    two.free()
    two.abort(waiting)
    if not one.idle():
        yield f"{one.name} has {one.free()}, not {one.blocks} free blocks"
    if not two.idle():
        yield f"{two.name} has {two.free()}, not {two.blocks} free blocks"
    if over(one, two, prompt)[0] != two.run(new_name(), prompt, 16)[0]:
        yield "other tokens afterwards"


def bad_input(one: Engine, two: Engine) -> Iterator[str]:
    """Input that cannot be fetched fails its request (`fail`), or is computed here (`recompute`), and the log says why."""
    (prompt,) = prompts(1, 80, 81, 4)
    good = write_ticket(new_ticket(one.name, deadline=2))
    for ticket, says in (
        (None, "the ticket that the prefill engine gave"),
        ("nonsense", "BAD_TYPE at ticket"),
        ({"key": "00"}, "OUT_OF_RANGE at key"),
        (good | {"engine": "nobody"}, "nobody"),
        (good, "WRONG_PEER"),  # its own
        (good | {"engine": two.name}, "UNKNOWN_TICKET"),
    ):
        params, name = {"do_remote_prefill": True, "ticket": ticket}, new_name()
        reason = one.run(name, prompt, 16, params)[1]
        logged = [line for line in one.said().splitlines() if f"request {name}" in line and says in line]
        if reason != "error" or not logged:
            yield f"{one.name}, ticket {ticket}: {reason}, and the log says: {one.said()}"
        if two.run(new_name(), prompt, 16, params)[0] != two.run(new_name(), prompt, 16)[0]:
            yield f"{two.name}, ticket {ticket}: other tokens"
    other = list(reversed(prompt))
    params = one.run(new_name(), prompt, 1, ASK)[2]
    if two.run(new_name(), other, 16, params)[0] != two.run(new_name(), other, 16)[0]:
        yield "pages of another prompt were used"
    if one.run(new_name(), prompt, 16, {"do_remote_prefill": True, "do_remote_decode": True})[1] != "length":
        yield "parameters that contradict each other failed a request that this engine can compute"


def prefix_hits(one: Engine, two: Engine) -> Iterator[str]:
    """Pages that the decode engine has are not fetched again; a prompt that it has whole is not fetched at all."""
    (prompt,) = prompts(1, 193, 194, 5)
    alone = one.run(new_name(), prompt, 16)[0]
    for case in (prompt, prompt, prompt[:129], [*prompt[:64], *prompts(1, 60, 61, 6)[0]]):
        tokens, _, _, cached = over(one, two, case)
        if tokens != one.run(new_name(), case, 16)[0]:
            yield f"prompt of {len(case)}, {cached} cached: {tokens}"
    if over(one, two, prompt)[0] != alone or not one.idle(DEADLINE / 2):
        yield "other tokens after a full hit, or its source was not told"


def tenants(one: Engine, two: Engine) -> Iterator[str]:
    """Pages of a `cache_salt` are found by its own requests alone, in decode's prefix cache too; two salts are refused."""
    (prompt,) = prompts(1, 193, 194, 10)  # all but the last token fills blocks, so that nothing is left to fetch
    alone = one.run(new_name(), prompt, 16)[0]
    for found in (False, True):
        for salt in ("", "red", "blue"):
            name = new_name()
            tokens = over(one, two, prompt, name=name, salt=salt)[0]
            if tokens != alone or (name not in two.fetched) != found:
                yield f"tenant {salt!r}: {tokens}, not {alone}, or fetched: {name in two.fetched}"
    params = one.run(new_name(), prompt[:150], 1, ASK, salt="red")[2]
    name = new_name()
    tokens = two.run(name, prompt[:150], 16, params, salt="green")[0]
    if name in two.fetched or tokens != one.run(new_name(), prompt[:150], 16)[0]:
        yield "pages of another tenant were fetched"
    if "CONTENT_MISMATCH" not in two.said():
        yield f"its log says {two.said()}"


def adapters(one: Engine, two: Engine) -> Iterator[str]:
    """One prompt with either adapter and with none, each way: other tokens, each as in the engine that computed it."""
    (prompt,) = prompts(1, 200, 201, 11)
    law, tax = (_adapter(one, name) for name in ADAPTERS)
    for prefill, decode in ((one, two), (two, one)):
        answers = []
        for lora in (law, None, tax, law):
            name, alone = new_name(), prefill.run(new_name(), prompt, 16, lora=lora)[0]
            answers.append(alone)
            if (found := over(prefill, decode, prompt, name=name, lora=lora)[0]) != alone:
                yield f"{prefill.name} to {decode.name}, {lora}: {found}, not {alone}"
            if len(answers) < 4 and name not in decode.fetched:
                yield f"{prefill.name} to {decode.name}, {lora}: not fetched"
        if len({*map(tuple, answers)}) != 3:
            yield f"{answers}: an adapter that changes nothing"


def other_weights(one: Engine, two: Engine) -> Iterator[str]:
    """A decode engine whose adapter of that name has other weights fetches nothing, and says why."""
    (prompt,) = prompts(1, 150, 151, 12)
    law, tax = (_adapter(one, name) for name in ADAPTERS)
    params, name = one.run(new_name(), prompt, 1, ASK, lora=law)[2], new_name()
    tokens = two.run(name, prompt, 16, params, lora=["law", tax[1]])[0]
    if name in two.fetched or tokens != one.run(new_name(), prompt, 16, lora=tax)[0]:
        yield "rows of another adapter were fetched"
    if "CONTENT_MISMATCH" not in two.said():
        yield f"its log says {two.said()}"


def _adapter(engine: Engine, name: str) -> list[str]:
    """The name of an adapter of an engine's model, and its folder."""
    return [name, str(make_adapter(Path(engine.settings["model"]), name))]


def speculates(one: Engine, two: Engine) -> Iterator[str]:
    """Decode proposes tokens by a draft whose pages came too: in as few steps as in the engine that computed them."""
    (prompt,) = prompts(1, 120, 121, 9)
    for prefill, decode in ((one, two), (two, one)):
        names = new_name(), new_name()
        alone, found = prefill.run(names[0], prompt, 48)[0], over(prefill, decode, prompt, 48, names[1])[0]
        steps = prefill.rounds(names[0]), decode.rounds(names[1])
        if alone != found or not steps[1] <= steps[0] <= 24:
            yield f"{prefill.name} to {decode.name}: {found} in {steps[1]} steps, not {alone} in {steps[0]}"


def stored(one: Engine, two: Engine) -> Iterator[str]:
    """A prompt that nobody hands over is stored by the other connector, and read when it comes again."""
    (prompt,) = prompts(1, 130, 131, 8)
    for engine in (one, two):
        (first, *_, none), (again, *_, read) = (engine.run(new_name(), prompt, 16) for _ in range(2))
        if first != again or none or not read:
            yield f"{engine.name}: {none} tokens read and {first}, then {read} and {again}"


def left_idle(one: Engine, two: Engine) -> Iterator[str]:
    """All blocks are free at the end."""
    for engine in (one, two):
        if not engine.idle():
            yield f"{engine.name} has {engine.free()}, not {engine.blocks} free blocks"


def killed(one: Engine, two: Engine) -> Iterator[str]:
    """A prefill engine dies: with a fetch under way, and before one begins; each ends soon, and as `policy` says."""
    (prompt,) = prompts(1, 150, 151, 7)
    alone = two.run(new_name(), prompt, 16)[0]
    computed = one.run(new_name(), prompt, 1, ASK)[2]
    awaited = {"do_remote_prefill": True, "ticket": write_ticket(new_ticket(one.name, deadline=60))}
    waiting = new_name()
    two.add(waiting, prompt, 16, awaited)  # its prefill never comes
    while not two.free()[1]:
        pass
    one.kill()
    died = time.monotonic()
    for when, request in (("under way", waiting), ("after that", "")):
        result = two.result(request) if request else two.run(new_name(), prompt, 16, computed)
        seconds, right = time.monotonic() - died, ("error", []) if two.policy == "fail" else ("length", alone)
        if result[1] != right[0] or result[0] not in (right[1], alone) or seconds > _SOON:
            yield f"{when}: {result[:2]} after {seconds:.1f} s, not {right}"
    if not two.idle():
        yield f"{two.name} has {two.free()}, not {two.blocks} free blocks"
    one.start()
    one.ready()
    asked = time.monotonic()
    result = two.run(new_name(), prompt, 16, computed)  # its source may yet learn of the ticket, so it waits
    if time.monotonic() - asked > _SOURCE_WAIT + _PROMPT_WAIT + _SOON or result[1] != right[0]:
        yield f"a ticket of before it started again: {result[:2]} after {time.monotonic() - asked:.1f} s"
    if over(one, two, prompt)[0] != alone:
        yield "other tokens after it started again"


def killed_other(one: Engine, two: Engine) -> Iterator[str]:
    """The same the other way round."""
    yield from killed(two, one)
