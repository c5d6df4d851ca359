"""Reference engines without memory in common with anybody: `python inline_engine.py sink` or `source` is an adapter.

As the drawing of packed.md shows, the sink says Credit once after Registered, and after each Data.
"""

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "conformance/testees"))

from live_sink import Decode
from live_source import Prefill
from toy_engine import serve

from kvproto.session.inline import SinkInline
from kvproto.wire import messages as m


def apart(adapter: Any) -> Any:
    """Have it answer `open` with anything but INLINE by `unsupported`."""
    plain = adapter.on_open

    def on_open(ask: dict[str, Any]) -> Any:
        if ask["transport"] != "INLINE":
            raise NotImplementedError("no memory in common")
        return plain(ask)

    adapter.on_open = on_open
    return adapter


def at_once(self: SinkInline) -> m.Credit | None:
    """A Credit for each Data, where the reference waits for a quarter of the window."""
    total = self._came.bytes + self._reader.window
    if total == self._came.total:
        return None
    self._came.total = total
    return m.Credit(session=self._session.session, kind=self._reader.kind, total=total)


if __name__ == "__main__":
    SinkInline.credit = at_once  # type: ignore[method-assign]
    serve(apart({"sink": Decode, "source": Prefill}[sys.argv[1]]()))
