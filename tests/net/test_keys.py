"""Files with keys, allow-lists and sources: what is taken, and how what is not is refused."""

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path

import pytest
import zmq

from kvproto import Seed, read_sources
from kvproto.errors import LocalError, RemoteError
from kvproto.net import AllowList, KeyPair, make_keys, read_keys
from kvproto.net.admission import ClientLoad
from kvproto.net.keys import check_public
from kvproto.session import Party
from kvproto.wire.enums import ErrorCode, Role
from tests.commands import Ran
from tests.errors import raises

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"


def test_keygen_makes_a_pair_that_only_its_owner_reads(tmp_path: Path, ran: Ran) -> None:
    """KVP-NET-SECRET."""
    folder = tmp_path / "keys"
    public = ran("keygen", folder).strip()
    assert (folder / "public.key").read_text() == f"{public}\n"
    assert os.stat(folder).st_mode & 0o777 == 0o700
    assert os.stat(folder / "secret.key").st_mode & 0o777 == 0o600
    assert public not in (folder / "secret.key").read_text()
    pair = read_keys(folder)
    assert pair.public.decode() == public
    assert zmq.curve_public(pair.secret) == pair.public
    assert pair.secret.decode() not in repr(pair)


def test_keygen_writes_over_nothing(tmp_path: Path, ran: Ran) -> None:
    made = make_keys(tmp_path)
    assert "secret.key" in ran("keygen", tmp_path, status=1)
    assert read_keys(tmp_path) == made


def test_keygen_that_fails_leaves_nothing_behind(tmp_path: Path, ran: Ran) -> None:
    (tmp_path / "public.key").write_text(f"{KEY}\n")
    assert "public.key" in ran("keygen", tmp_path, status=1)
    assert os.listdir(tmp_path) == ["public.key"]
    assert (tmp_path / "public.key").read_text() == f"{KEY}\n"


def test_the_advice_for_a_key_that_is_lost_can_be_followed(tmp_path: Path) -> None:
    """keygen writes over nothing, so beside what is left of a pair it names another folder."""
    with pytest.raises(LocalError, match=f"keygen {tmp_path}` makes a pair"):
        read_keys(tmp_path)
    (tmp_path / "public.key").write_text(f"{KEY}\n")
    with pytest.raises(LocalError, match="keygen NEW_FOLDER` makes a pair"):
        read_keys(tmp_path)


@pytest.mark.parametrize(
    ("text", "mode", "right"),
    [
        (b"", 0o600, "40 characters"),
        (b"\n", 0o600, "40 characters"),
        (b"short\n", 0o600, "5 characters"),
        (b'"' * 40, 0o600, "40 of them not of Z85"),
        (b"#" * 40, 0o600, "more than 32 bits"),
        (b"0" * 41, 0o600, "41 characters"),
        (b"\xff" * 40, 0o600, "40 of them not of Z85"),
        (KEY.encode(), 0o644, "0600"),
        (None, 0o600, "keygen"),
    ],
)
def test_a_key_file_that_cannot_be(tmp_path: Path, text: bytes | None, mode: int, right: str) -> None:
    """KVP-NET-SECRET: the error names the file and what is right, and holds nothing of the secret."""
    path = tmp_path / "secret.key"
    if text is not None:
        path.write_bytes(text)
        path.chmod(mode)
    with raises(LocalError, match=right, path=str(path)) as caught:
        read_keys(tmp_path)
    assert KEY not in str(caught.value)


def test_a_folder_that_others_may_write_to(tmp_path: Path) -> None:
    """KVP-NET-SECRET: they could put other keys there, and another allow-list."""
    folder = tmp_path / "keys"
    made = make_keys(folder)
    folder.chmod(0o707)
    with raises(LocalError, match="chmod go-w", path=str(folder)):
        read_keys(folder)
    folder.chmod(0o770)
    with pytest.raises(LocalError, match=r"no other user may write to, got mode 0770"):
        read_keys(folder)
    for mode in (0o755, 0o1777):  # in a sticky one they can neither rename nor replace what is there
        folder.chmod(mode)
        assert read_keys(folder) == made


def mounted(folder: Path, mode: int, group: int = -1, times: str = "..2026_11_27") -> KeyPair:
    """A Secret as kubelet mounts it: links in a sticky directory, to a directory that is swapped."""
    made = make_keys(folder / times)
    folder.chmod(0o1777)
    for name in ("secret.key", "public.key"):
        (folder / times / name).chmod(mode)
        os.chown(folder / times / name, -1, group)
        with contextlib.suppress(FileExistsError):
            (folder / name).symlink_to(f"..data/{name}")
    new = folder / "..data_tmp"
    new.symlink_to(times)
    new.rename(folder / "..data")
    return made


@pytest.mark.skipif(os.geteuid() != 0, reason="only root mounts as kubelet does")
@pytest.mark.parametrize(("mode", "group"), [(0o400, 12345), (0o440, 0), (0o600, 0), (0o640, 0)])
def test_a_mounted_secret(tmp_path: Path, mode: int, group: int) -> None:
    """KVP-NET-SECRET: of a group that this process is in, or of root alone; and again when it was swapped."""
    for day in ("..2026_11_27", "..2026_11_28"):
        made = mounted(tmp_path, mode, group, day)
        assert read_keys(tmp_path) == made


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize(("mode", "group"), [(0o644, 0), (0o440, 12345), (0o444, 0), (0o404, 0)])
def test_a_mounted_secret_that_others_may_read(tmp_path: Path, mode: int, group: int) -> None:
    """KVP-NET-SECRET: the advice names the fields to set."""
    mounted(tmp_path, mode, group)
    with pytest.raises(LocalError, match=r"chmod 600 .*defaultMode: 0400, or 0440 with fsGroup"):
        read_keys(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("whose", ["secret.key", "..data", "..2026_11_27", "..2026_11_27/secret.key"])
def test_a_mounted_secret_that_somebody_else_has_put_there(tmp_path: Path, whose: str) -> None:
    """KVP-NET-SECRET: in a sticky directory everybody may add names."""
    mounted(tmp_path, 0o600)
    os.chown(tmp_path / whose, 65534, -1, follow_symlinks=False)
    with raises(LocalError, match="one of user 65534"):
        read_keys(tmp_path)


def test_the_public_key_is_that_of_the_secret(tmp_path: Path) -> None:
    made, other = make_keys(tmp_path / "ours"), make_keys(tmp_path / "other")
    public = tmp_path / "ours" / "public.key"
    public.write_bytes(other.public + b"\n")
    with raises(LocalError, match=r"the public key of secret\.key", path=str(public)) as caught:
        read_keys(tmp_path / "ours")
    assert made.public.decode() in str(caught.value)
    public.unlink()
    assert read_keys(tmp_path / "ours") == made


def test_a_pipe_is_no_key_file_and_is_not_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "secret.key", 0o600)
    with pytest.raises(LocalError, match="no regular file"):
        read_keys(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
@pytest.mark.parametrize("whose", ["", "secret.key", "allow.toml", "sources.toml"])
def test_what_another_user_owns_is_not_trusted(tmp_path: Path, whose: str) -> None:
    """KVP-NET-SECRET: also where root could read it."""
    make_keys(tmp_path)
    for name in ("allow.toml", "sources.toml"):
        (tmp_path / name).write_text(LIST)
    os.chown(tmp_path / whose, 65534, -1)
    reads: dict[str, Callable[[Path], object]] = {"allow.toml": AllowList, "sources.toml": read_sources}
    with raises(LocalError, match="one of user 65534", path=str(tmp_path / whose)):
        reads.get(whose, lambda path: read_keys(tmp_path))(tmp_path / whose)


LIST = f"""
[[client]]
key = "{KEY}"
engine = "decode"
ranks = [0, 1]

[[client]]
key = "{KEY}"
engine = "canary"
replicas = [2]
roles = ["source"]
"""


def allowed(path: Path, text: str = LIST) -> AllowList:
    path.write_text(text)
    return AllowList(path)


@pytest.mark.parametrize(
    ("party", "role"),
    [
        (Party("decode", 0, 0, 1), Role.SINK),
        (Party("decode", 7, 1, 1), Role.SINK),
        (Party("canary", 2, 9, 1), Role.SOURCE),
    ],
)
def test_what_a_key_may_be(tmp_path: Path, party: Party, role: Role) -> None:
    """KVP-NET-ALLOW."""
    allowed(tmp_path / "allow.toml").check(KEY.encode(), party, role)


@pytest.mark.parametrize(
    ("party", "role"),
    [
        (Party("decode", 0, 2, 1), Role.SINK),
        (Party("decode", 0, 0, 1), Role.SOURCE),
        (Party("prefill", 0, 0, 1), Role.SINK),
        (Party("canary", 0, 0, 1), Role.SOURCE),
        (Party("canary", 2, 0, 1), Role.SINK),
    ],
)
def test_what_a_key_may_not_be(tmp_path: Path, party: Party, role: Role) -> None:
    """KVP-NET-ALLOW."""
    with raises(RemoteError, code=ErrorCode.NOT_ALLOWED) as caught:
        allowed(tmp_path / "allow.toml").check(KEY.encode(), party, role)
    assert "decode ranks [0, 1] as SINK" in caught.value.mine


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("client", ""),
        ("[[clients]]", ""),
        ("[client]", ""),
        ("client = 1", ""),
        ("client = [1]", "client[0]"),
        ('[[client]]\nengine = "decode"', "client[0].key"),
        ('[[client]]\nkey = "short"\nengine = "decode"', "client[0].key"),
        (f'[[client]]\nkey = "{KEY}"', "client[0].engine"),
        (f'[[client]]\nkey = "{KEY}"\nengine = "decode"\nrank = [0]', "client[0]"),
        (f'[[client]]\nkey = "{KEY}"\nengine = "decode"\nranks = 0', "client[0].ranks"),
        (f'[[client]]\nkey = "{KEY}"\nengine = "decode"\nranks = [-1]', "client[0].ranks"),
        (f'[[client]]\nkey = "{KEY}"\nengine = "decode"\nroles = ["router"]', "client[0].roles"),
        (f'[[client]]\nkey = "{KEY}"\nengine = "decode"\nroles = []', "client[0].roles"),
    ],
)
def test_an_allow_list_that_cannot_be(tmp_path: Path, text: str, at: str) -> None:
    path = tmp_path / "allow.toml"
    with raises(LocalError, path=f"{path}: {at}" if at else str(path)):
        allowed(path, text)


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_a_list_that_others_may_write_to(tmp_path: Path, mode: int, caplog: pytest.LogCaptureFixture) -> None:
    """KVP-NET-ALLOW: neither at the start nor when it changes; what is put right is taken, and the log says so."""
    caplog.set_level(logging.INFO, "kvproto")
    path = tmp_path / "allow.toml"
    found = allowed(path)
    path.write_text("")
    path.chmod(mode)
    with raises(LocalError, match=f"no other user may write to, got mode {mode:04o}", path=str(path)):
        AllowList(path)
    assert not found.renew(10)
    assert "its earlier content applies" in caplog.text
    assert found.knows(KEY.encode())
    path.chmod(0o644)
    assert found.renew(20)
    assert f"read the allow-list {path} again: it has the keys of 0 clients" in caplog.text


def test_a_pipe_is_no_list(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "allow.toml", 0o600)
    with pytest.raises(LocalError, match="expected an allow-list, got no regular file"):
        AllowList(tmp_path / "allow.toml")
    with pytest.raises(LocalError, match="expected a file of sources, got no regular file"):
        read_sources(tmp_path / "allow.toml")


@pytest.mark.parametrize("mode", [0o666, 0o664, 0o602])
def test_sources_that_others_may_write(tmp_path: Path, mode: int) -> None:
    """KVP-NET-KEY: whoever writes the file says which key a source must have."""
    path = tmp_path / "sources.toml"
    path.write_text(f'[[source]]\nengine = "p"\naddress = "tcp://a:1"\nkey = "{KEY}"')
    path.chmod(mode)
    with raises(LocalError, match=f"no other user may write to, got mode {mode:04o}", path=str(path)):
        read_sources(path)
    path.chmod(0o644)
    assert read_sources(path) == {("p", 0): Seed("tcp://a:1", KEY)}


@pytest.mark.parametrize(
    ("key", "flaw"),
    [
        (KEY[:-1], "39 characters"),
        (f"{KEY[:-2]}~é", "2 of them not of Z85"),
        ("#" * 40, "more than 32 bits, so one is mistaken"),
        (7, "int"),
    ],
)
def test_what_is_wrong_with_a_public_key_is_said(key: object, flaw: str) -> None:
    with pytest.raises(LocalError, match=flaw):
        check_public("key", key)


def test_a_list_that_changes_is_read_again_and_a_broken_one_is_not(tmp_path: Path) -> None:
    """KVP-NET-REVOKE: an operator's slip lets nobody in and throws nobody out."""
    path = tmp_path / "allow.toml"
    found = allowed(path)
    assert not found.renew(0)
    path.write_text("[[client]")
    assert not found.renew(10)
    assert found.knows(KEY.encode())
    path.unlink()
    assert not found.renew(20)
    assert found.knows(KEY.encode())
    path.write_text("")
    assert not found.renew(20.5), "looked at once a second"
    assert found.renew(30)
    assert not found.knows(KEY.encode())


def test_one_pair_of_brackets_is_told_to_be_two(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match=r"one \[\[client\]\], in double brackets, for each client"):
        allowed(tmp_path / "allow.toml", f'[client]\nkey = "{KEY}"\nengine = "decode"')


def test_sources_without_keys_are_said_to_be_so(tmp_path: Path) -> None:
    """KVP-NET-KEY."""
    path = tmp_path / "sources.toml"
    path.write_text('[[source]]\nengine = "prefill"\naddress = "tcp://10.0.0.1:7100"')
    with pytest.raises(LocalError, match=r"the public key of the source at tcp://10\.0\.0\.1:7100"):
        read_sources(path)
    assert read_sources(path, insecure=True) == {("prefill", 0): Seed("tcp://10.0.0.1:7100")}


def test_the_log_names_the_client_that_keeps_a_source_busy(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Once in a while, and only one that takes most of the time."""
    load = ClientLoad(allowed(tmp_path / "allow.toml"))
    times = [n / 100 for n in range(1000, 3000)]
    for now in times:
        load.add(b"fair", now, now + 0.003)
    assert not caplog.records
    for now in times:
        load.add(KEY.encode(), now + 30, now + 30.008)
        load.add(b"fair", now + 30.008, now + 30.009)
    said = [record.getMessage() for record in caplog.records]
    assert 1 <= len(said) <= 2
    assert said[0].startswith(f"client canary, decode (key {KEY}) keeps this source busy: 1")
    assert "79% of" in said[0]


def test_a_key_of_many_engines_is_named_by_the_first_of_them(tmp_path: Path) -> None:
    """In the log, and in what a client hears that is none of them."""
    entries = [f'[[client]]\nkey = "{KEY}"\nengine = "decode-{n:03}"\nranks = {list(range(64))}\n' for n in range(512)]
    found = allowed(tmp_path / "allow.toml", "\n".join(entries))
    first = "decode-000, decode-001, decode-002 and 509 more"
    assert found.name(KEY.encode()) == f"{first} (key {KEY})"
    with pytest.raises(RemoteError) as caught:
        found.check(KEY.encode(), Party("other", 0, 0, 1), Role.SINK)
    ranks = "ranks [0, 1, 2, 3, 4, 5, 6, 7 and 56 more]"
    assert caught.value.mine.startswith(f"decode-000 {ranks} as SINK; decode-001 {ranks} as SINK; ")
    assert caught.value.mine.endswith(" and 509 more")


def test_sources_of_a_file(tmp_path: Path) -> None:
    path = tmp_path / "sources.toml"
    path.write_text(f"""
    [[source]]
    engine = "prefill"
    address = "tcp://10.0.0.1:7100"
    key = "{KEY}"
    [[source]]
    engine = "prefill"
    replica = 1
    address = "ipc:///run/kv/prefill"
    """)
    assert read_sources(path) == {
        ("prefill", 0): Seed("tcp://10.0.0.1:7100", KEY),
        ("prefill", 1): Seed("ipc:///run/kv/prefill"),
    }


@pytest.mark.parametrize(
    ("text", "at"),
    [
        ("[[", ""),
        ("[[sources]]", ""),
        ("source = [1]", "source[0]"),
        ('[[source]]\naddress = "tcp://a:1"', "source[0].engine"),
        ('[[source]]\nengine = "prefill"', "source[0].address"),
        ('[[source]]\nengine = "p"\naddress = "tcp://a:1"\nkey = ""', "source[0].key"),
        ('[[source]]\nengine = "p"\naddress = "tcp://a:1"\nreplica = -1', "source[0].replica"),
        ('[[source]]\nengine = "p"\naddress = "tcp://a:1"\nport = 1', "source[0]"),
        ('[[source]]\nengine = "p"\naddress = "tcp://a:1"', "source[0].key"),
        ('[source]\nengine = "p"\naddress = "ipc:///a/b"', ""),
        (2 * '[[source]]\nengine = "p"\naddress = "ipc:///a/b"\n', "source[1]"),
    ],
)
def test_sources_that_cannot_be(tmp_path: Path, text: str, at: str) -> None:
    path = tmp_path / "sources.toml"
    path.write_text(text)
    with raises(LocalError, path=f"{path}: {at}" if at else str(path)):
        read_sources(path)
