"""Through staging slots: windows that begin late, whose stream is as long as its first Chunk says, and other axes."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from kvproto import Options, new_ticket
from kvproto.errors import RemoteError
from kvproto.transport.nixl.direct import WriteMode
from kvproto.transport.nixl.transport import NixlTransport
from kvproto.wire.enums import ErrorCode

from .axes import ENDS, IMAGES, both, prompt
from .axes import OURS as PAGES
from .axes import TABLES as HELD
from .late import TABLES, TOKENS, gone, late

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


def staged(**more: Any) -> Options:
    return Options(transports=[NixlTransport(WriteMode.PACKED, 4, 96)], **more)


@pytest.mark.parametrize(
    ("asked", "since"),
    [
        ({"cached": {"window": 17}}, {}),
        ({"late": ["window"]}, {"window": 18}),
        ({"late": True, "cached": {"full": TOKENS}}, {"window": TOKENS}),
    ],
)
def test_a_window_begins_where_its_rows_are(tmp_path: Path, asked: dict[str, Any], since: dict[str, int]) -> None:
    """KVP-GRANT-LATE: also where prefill says meanwhile how far it is, and where no byte is left to move."""
    with late(tmp_path, staged(), staged()) as both:
        (request,), found = both.begin(**asked)
        request.computed(TABLES, 20, since={"window": 12})
        first = since.get("window", 16)
        request.finish({**TABLES, "window": gone(TABLES["window"], first // 4)}, since={"window": first})
        assert found.wait(20).since == since
        both.check({"full": 0, "window": 17, **asked.get("cached", {}), **since})


def test_a_late_stream_begins_when_it_is_known_where(tmp_path: Path) -> None:
    """KVP-GRANT-LATE: not while prefill may still give pages up, although all rows of some layers are there."""
    with late(tmp_path, staged(thread=False), staged(thread=False)) as both_:
        (request,), found = both_.begin(late=True)
        request.computed(TABLES, TOKENS)
        for _ in range(100):
            both_.turn()
        both_.check({"full": TOKENS, "window": TOKENS})
        request.finish({**TABLES, "window": gone(TABLES["window"], 2)}, since={"window": 8})
        while not found.done:
            both_.turn()
        assert found.wait(0).since == {"window": 8}
        both_.check({"window": 8})


def test_who_asks_for_what_is_gone_is_refused(tmp_path: Path) -> None:
    """KVP-GRANT-HELD: and the slots serve the next request."""
    with late(tmp_path, staged(), staged()) as both:
        (request,), found = both.begin()
        request.computed(TABLES, TOKENS)
        request.finish({**TABLES, "window": gone(TABLES["window"], 4)}, since={"window": 16})
        with pytest.raises(RemoteError) as refused:
            found.wait(20)
        assert refused.value.code == ErrorCode.NOT_HELD
        both.poison()
        (request,), found = both.begin()
        request.finish(TABLES)
        found.wait(20)
        both.check({})


def test_layers_with_rows_of_another_axis_wait_until_prefill_is_over(tmp_path: Path) -> None:
    with both(tmp_path, staged(thread=False), staged(thread=False)) as two:
        asked, ticket = prompt(*IMAGES), new_ticket("prefill")
        request, fetch = two.source.request(ticket, asked), two.sink.fetch(ticket, asked, PAGES)
        two.source.pool.array("cross", 0, "cross_k")[:] = 0
        request.computed(HELD, ENDS["self"])
        for _ in range(100):
            two.turn()
        two.source.pool.array("cross", 0, "cross_k")[:] = 7
        request.finish(HELD)
        while not fetch.done:
            two.turn()
        two.check(ENDS, {})
