"""Two engines with CURVE keys on loopback TCP, for the tests of the door."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import attrs
import numpy as np

from kvproto import Fetch, Options, Pool, Seed, Sink, Source, new_ticket
from kvproto.net import make_keys

from .doors import GEOMETRY, PAGES, PROMPT, Two, filled, rows


@attrs.frozen
class Host:
    """An engine's folder of keys."""

    folder: Path
    public: str

    @property
    def options(self) -> Options:
        return Options(keys=self.folder, thread=False)


def host(folder: Path, name: str) -> Host:
    return Host(folder / name, make_keys(folder / name).public.decode())


def entry(client: Host, engine: str = "decode", more: str = "") -> str:
    return f'[[client]]\nkey = "{client.public}"\nengine = "{engine}"\n{more}\n'


def allow(source: Host, entries: Sequence[str]) -> None:
    """Write its allow-list as an editor does: another file takes the place of the former."""
    made = source.folder / "new"
    made.write_text("".join(entries))
    made.rename(source.folder / "allow.toml")


def listening(prefill: Host, entries: Sequence[str]) -> Source:
    allow(prefill, entries)
    return Source("prefill", filled(), "tcp://127.0.0.1:*", prefill.options)


def dialling(decode: Host, source: Source, key: str, name: str = "decode") -> Sink:
    seed = Seed(source._node._listener.address, key)
    return Sink(name, Pool.allocate(GEOMETRY, PAGES), {"prefill": seed}, decode.options)


@contextmanager
def keyed(folder: Path) -> Iterator[tuple[Two, Host, Host]]:
    """A source and a sink that know each other."""
    prefill, decode = host(folder, "prefill"), host(folder, "decode")
    with listening(prefill, [entry(decode)]) as source, dialling(decode, source, prefill.public) as sink:
        yield Two(source, sink), prefill, decode


def ask(both: Two, pages: Sequence[int] = (9, 0, 5)) -> Fetch:
    """A request that is computed, and its fetch."""
    ticket = new_ticket("prefill")
    both.source.request(ticket, PROMPT).finish({"kv": [3, 1, 2]})
    return both.sink.fetch(ticket, PROMPT, {"kv": pages})


def served(both: Two) -> None:
    """One transfer, every byte in its place."""
    found = ask(both)
    both.until(lambda: found.done)
    found.wait(0)
    assert np.array_equal(rows(both.sink.pool, [9, 0, 5]), rows(both.source.pool, [3, 1, 2]))
