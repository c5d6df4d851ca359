"""A user's program that mypy --strict checks against the installed package, which needs py.typed and public types."""

from typing import assert_type

import kvproto
from kvproto import wire
from kvproto.errors import KvprotoError
from kvproto.planning.layout import Cache, Parallel, lay_out
from kvproto.planning.plan import Plan, plan

assert_type(kvproto.__version__, str)
cache = Cache.mla("target", layers=61, latent=512, rope=64, page=64)
made = plan(lay_out([cache], Parallel(tp=8)), lay_out([cache], Parallel(tp=4)))
assert_type(made, Plan)
assert_type(made.required(1), tuple[int, ...])
try:
    wire.decode(b"")
except KvprotoError as error:
    assert_type(error.path, str)
lay_out(cache)  # type: ignore[arg-type]  # a list is wanted; mypy says so only where types are seen
