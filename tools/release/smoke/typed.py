"""A user's program that mypy --strict checks against the installed package, which needs py.typed and public types."""

from typing import assert_type

import kvproto
from kvproto import Cache, Fetch, KvprotoError, Parallel, Pool, Prompt, Sink, Ticket, lay_out, plan, wire
from kvproto.events import Arrived
from kvproto.planning.plan import Plan

assert_type(kvproto.__version__, str)
cache = Cache.mla("target", layers=61, latent=512, rope=64, page=64)
made = plan(lay_out([cache], Parallel(tp=8)), lay_out([cache], Parallel(tp=4)))
assert_type(made, Plan)
assert_type(made.required(1), tuple[int, ...])


def fetched(sink: Sink, ticket: Ticket, pool: Pool) -> Arrived:
    """Fetch a request as an engine does."""
    fetch = sink.fetch(ticket, Prompt(range(40)), {"target": [5, 1, 6]})
    assert_type(fetch, Fetch)
    assert_type(pool.pages("target"), int)
    return assert_type(fetch.wait(10), Arrived)


try:
    wire.decode(b"")
except KvprotoError as error:
    assert_type(error.path, str)
lay_out(cache)  # type: ignore[arg-type]  # a list is wanted; mypy says so only where types are seen
