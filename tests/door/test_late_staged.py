"""Windows that begin late through staging slots: a stream is as long as its first Chunk says."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest

from kvproto import Options
from kvproto.errors import RemoteError
from kvproto.transport.nixl.direct import WriteMode
from kvproto.transport.nixl.transport import NixlTransport
from kvproto.wire.enums import ErrorCode

from .late import TABLES, TOKENS, gone, late

pytestmark = pytest.mark.skipif(importlib.util.find_spec("nixl") is None, reason="nixl is not installed")


def staged() -> Options:
    return Options(transports=[NixlTransport(WriteMode.PACKED, 4, 96)])


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
