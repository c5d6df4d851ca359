"""Engines with CURVE keys over loopback TCP: who is let in, who is not, and what becomes of the others meanwhile."""

from pathlib import Path

import pytest

from kvproto import Cache, DType, KvprotoError, Options, Parallel, Pool, Seed, Sink, Source, lay_out, new_ticket
from kvproto import events as told
from kvproto.errors import LocalError
from kvproto.net import Dialer, read_keys
from kvproto.wire import encode
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Ping
from tests.errors import raises

from .doors import GEOMETRY, PAGES, PROMPT, Two, filled, rows
from .keyed import Host, allow, ask, dialling, entry, host, keyed, served

pytestmark = pytest.mark.usefixtures("watchful")


def refused(both: Two, code: ErrorCode) -> KvprotoError:
    """A fetch that fails with this code."""
    found = ask(both, [1, 2, 4])
    with raises(KvprotoError, code=code) as caught:
        both.ends(found)
    return caught.value


def test_two_that_know_each_other(tmp_path: Path) -> None:
    """KVP-NET-CURVE, KVP-NET-KEY."""
    with keyed(tmp_path) as (both, _, _):
        served(both)


def test_a_client_that_is_not_on_the_list(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """KVP-NET-UNKNOWN: its Hello is not heard, both operators are told why, and it gets in once it is listed."""
    with keyed(tmp_path) as (both, prefill, decode):
        stranger = host(tmp_path, "stranger")
        with dialling(stranger, both.source, prefill.public, "canary") as sink:
            other = Two(both.source, sink)
            refused(other, ErrorCode.NOT_ALLOWED)
            assert f"its key {stranger.public} is not in {prefill.folder / 'allow.toml'}" in caplog.text
            assert "canary" not in {s.peer.engine for s in both.source._node.endpoint.sessions.values()}
            allow(prefill, [entry(decode), entry(stranger, "canary")])
            _until_listed(both, stranger)
            served(other)
        served(both)


def _until_listed(both: Two, client: Host, listed: bool = True) -> None:
    allowed = both.source._node._listener._allow
    assert allowed is not None
    both.until(lambda: allowed.knows(client.public.encode()) == listed)


def test_a_server_with_another_key(tmp_path: Path) -> None:
    """KVP-NET-KEY: a sink sends nothing to a source that has not the key it was told."""
    with keyed(tmp_path) as (both, _, decode):
        other = host(tmp_path, "other")
        with dialling(decode, both.source, other.public) as sink:
            error = refused(Two(both.source, sink), ErrorCode.WRONG_PEER)
            assert "compare it with the source's public.key" in error.advice
            assert "insecure" not in str(error)
        served(both)


def test_a_welcome_that_leads_to_another_key(tmp_path: Path) -> None:
    """KVP-NET-KEY: at each endpoint of a Welcome the key of the seed is demanded."""
    prefill, decode, other = (host(tmp_path, name) for name in ("prefill", "decode", "other"))
    for each in (prefill, other):
        allow(each, [entry(decode)])
    wide = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=4, page=4, dtype=DType.U8)], Parallel(tp=2))
    first, second = (Pool.allocate(wide, PAGES, rank=rank) for rank in range(2))
    port = {rank: f"tcp://127.0.0.1:{rank + 1}" for rank in range(2)}
    with (
        Source("prefill", second, port | {1: "tcp://127.0.0.1:*"}, other.options) as impostor,
        Source(
            "prefill", first, {0: "tcp://127.0.0.1:*", 1: impostor._node._listener.address}, prefill.options
        ) as source,
        dialling(decode, source, prefill.public) as sink,
    ):
        found = sink.fetch(new_ticket("prefill"), PROMPT, {"kv": [1, 2, 4]})
        while not found.done:
            for each_door in (source, impostor, sink):
                each_door.step(0.002)
        with raises(KvprotoError, code=ErrorCode.WRONG_PEER):
            found.wait(0)
        assert not impostor._node.endpoint.sessions


def test_a_client_without_keys(tmp_path: Path) -> None:
    """KVP-NET-CURVE."""
    with keyed(tmp_path) as (both, _, _):
        address = both.source._node._listener.address
        insecure = Options(insecure=True, thread=False)
        with Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": address}, insecure) as sink:
            error = refused(Two(both.source, sink), ErrorCode.WRONG_PEER)
            assert "give this sink keys" in error.advice
        served(both)


def test_a_source_without_keys(tmp_path: Path) -> None:
    """KVP-NET-CURVE: a sink that was told a key does not fall back to none."""
    prefill, decode = host(tmp_path, "prefill"), host(tmp_path, "decode")
    with (
        Source("prefill", filled(), "tcp://127.0.0.1:*", Options(insecure=True, thread=False)) as source,
        dialling(decode, source, prefill.public) as sink,
    ):
        error = refused(Two(source, sink), ErrorCode.WRONG_PEER)
        assert "a source that has none needs keys too" in error.advice


def test_a_client_that_sends_frames_without_a_session_is_named(tmp_path: Path) -> None:
    """By what CURVE has proven: the engine of its entry, and its key."""
    with keyed(tmp_path) as (both, prefill, decode):
        dialer = Dialer(keys=read_keys(decode.folder))
        frame = encode(Ping(session=77, request=1))
        dialer.send((0, both.source._node._listener.address), frame, prefill.public.encode())
        error = both.until(lambda: [e for e in both.told if isinstance(e, told.ProtocolError)])[0]
        dialer.close()
        assert error.error.code == ErrorCode.UNKNOWN_SESSION
        assert error.peer == f"decode (key {decode.public})"
        served(both)


@pytest.mark.parametrize("more", ["ranks = [1]", "replicas = [3]", 'roles = ["source"]'])
def test_a_key_that_may_not_be_this_rank(tmp_path: Path, more: str) -> None:
    """KVP-NET-ALLOW: a Hello outside of the list is refused, others are served."""
    with keyed(tmp_path) as (both, prefill, decode):
        second = host(tmp_path, "second")
        allow(prefill, [entry(decode), entry(second, "canary", more)])
        _until_listed(both, second)
        with dialling(second, both.source, prefill.public, "canary") as sink:
            refused(Two(both.source, sink), ErrorCode.NOT_ALLOWED)
        served(both)


def test_an_engine_that_the_key_does_not_own(tmp_path: Path) -> None:
    """KVP-NET-ALLOW: nobody takes another's place by its name."""
    with keyed(tmp_path) as (both, prefill, decode):
        served(both)
        second = host(tmp_path, "second")
        allow(prefill, [entry(decode), entry(second, "canary")])
        _until_listed(both, second)
        with dialling(second, both.source, prefill.public, "decode") as sink:
            refused(Two(both.source, sink), ErrorCode.NOT_ALLOWED)
        with dialling(second, both.source, prefill.public, "canary") as sink:
            served(Two(both.source, sink))
        served(both)


def test_a_key_is_revoked(tmp_path: Path) -> None:
    """KVP-NET-REVOKE, KVP-SES-REVOKED: it hears so at once, its connections end, and the others go on."""
    with keyed(tmp_path) as (both, prefill, decode):
        second = host(tmp_path, "second")
        allow(prefill, [entry(decode), entry(second, "canary")])
        _until_listed(both, second)
        with dialling(second, both.source, prefill.public, "canary") as sink:
            other = Two(both.source, sink)
            served(other)
            ticket = new_ticket("prefill")
            request = both.source.request(ticket, PROMPT)
            under_way = sink.fetch(ticket, PROMPT, {"kv": [6, 7, 8]})
            other.until(lambda: request.state is not None and request.state.asking())
            allow(prefill, [entry(decode)])
            over = both.until(lambda: [e for e in both.told if isinstance(e, told.Disconnected)])
            assert "canary" in over[0].peer
            assert "NOT_ALLOWED" in over[0].reason
            request.finish({"kv": [3, 1, 2]})
            assert isinstance(both.ends(request), told.Undelivered)
            other.until(lambda: under_way.done)
            assert not rows(sink.pool, [6, 7, 8]).any()
            with pytest.raises(KvprotoError, match="NOT_ALLOWED"):
                under_way.wait(0)
            refused(other, ErrorCode.NOT_ALLOWED)
            assert {e.error.code for e in other.told if isinstance(e, told.Refused)} == {ErrorCode.NOT_ALLOWED}
            connections = both.source._node._listener._connections
            other.until(lambda: connections.count == 1)
            served(both)


def test_a_rank_is_revoked(tmp_path: Path) -> None:
    """KVP-NET-REVOKE: a key that stays on the list keeps only what it may still be."""
    with keyed(tmp_path) as (both, prefill, decode):
        served(both)
        allow(prefill, [entry(decode, more="ranks = [5]")])
        both.until(lambda: [e for e in both.told if isinstance(e, told.Disconnected)])
        found = ask(both)
        with pytest.raises(KvprotoError):
            both.ends(found)
        refused(both, ErrorCode.NOT_ALLOWED)


@pytest.mark.parametrize(
    ("change", "path", "words"),
    [
        (lambda at: (at / "secret.key").write_text(""), "secret.key", "40 characters"),
        (lambda at: (at / "secret.key").chmod(0o644), "secret.key", "0600"),
        (lambda at: (at / "secret.key").unlink(), "secret.key", "keygen"),
        (lambda at: (at / "allow.toml").unlink(), "allow.toml", "client"),
    ],
)
def test_keys_that_cannot_be_used(tmp_path: Path, change, path: str, words: str) -> None:  # type: ignore[no-untyped-def]
    """KVP-NET-SECRET: the error names the file, and what is right."""
    prefill = host(tmp_path, "prefill")
    allow(prefill, [])
    change(prefill.folder)
    with raises(LocalError, match=words, path=str(prefill.folder / path)):
        Source("prefill", filled(), "tcp://127.0.0.1:*", prefill.options)


def test_a_seed_without_a_key(tmp_path: Path) -> None:
    decode = host(tmp_path, "decode")
    for seed in ("tcp://127.0.0.1:7100", Seed("tcp://127.0.0.1:7100", "short")):
        with raises(LocalError, path="key"):
            Sink("decode", Pool.allocate(GEOMETRY, PAGES), {"prefill": seed}, decode.options)


def test_keys_and_insecure_are_one_too_many(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="leave one out"):
        Options(keys=tmp_path, insecure=True)
    with pytest.raises(LocalError, match="keys too"):
        Options(allow=tmp_path / "allow.toml")


def test_a_source_whose_name_is_not_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fetch that is given up says so: the operator need not look for a firewall."""
    monkeypatch.setattr("kvproto.session.limits.PATIENCE", 0.5)
    seeds = {"prefill": f"tcp://{'x' * 64}:7100"}  # no name server is asked for that
    with Sink("decode", Pool.allocate(GEOMETRY, PAGES), seeds, Options(insecure=True)) as sink:
        found = sink.fetch(new_ticket("prefill"), PROMPT, {"kv": [1, 2, 4]})
        with raises(KvprotoError, match="its host name cannot be resolved here", code=ErrorCode.PEER_LOST):
            found.wait(30)
