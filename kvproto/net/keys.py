"""CURVE keys, lines of 40 characters (Z85): `secret.key`, only its owner's, and `public.key` (KVP-NET-SECRET)."""

import os
import stat
import struct
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import attrs
import zmq
from zmq.utils import z85

from kvproto.errors import bad, check_type
from kvproto.wire.plain import MOST_BYTES

SECRET, PUBLIC = "secret.key", "public.key"
_CHARACTERS = 40
_ALPHABET = frozenset("0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")


@attrs.frozen
class KeyPair:
    """The keys of an engine, in Z85."""

    public: bytes
    secret: bytes = attrs.field(repr=False)


def make_keys(folder: Path) -> KeyPair:
    """Write a new pair into a folder, made with mode 0700 if missing; raises LocalError(OUT_OF_RANGE)."""
    public, secret = zmq.curve_keypair()
    written: list[Path] = []
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path, key, mode in ((folder / SECRET, secret, 0o600), (folder / PUBLIC, public, 0o644)):
            opened = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            written.append(path)
            with open(opened, "wb") as file:
                file.write(key + b"\n")
    except OSError as error:
        for path in written:  # half a pair would be useless
            path.unlink(missing_ok=True)
        if isinstance(error, FileExistsError):
            advice = "engines may be using it: choose another folder, or remove it first"
            raise bad(str(error.filename), "a folder without keys", "there is one already", advice) from error
        raise bad(str(folder), "a folder to write to", str(error), "choose another folder") from error
    return KeyPair(public, secret)


def read_keys(folder: str | Path) -> KeyPair:
    """Read and compare the pair in a folder that no other user may write to (KVP-NET-SECRET); raises LocalError."""
    path = Path(folder) / SECRET
    empty = not any(os.path.lexists(path.with_name(name)) for name in (SECRET, PUBLIC))
    advice = f"`kvproto keygen {folder if empty else 'NEW_FOLDER'}` makes a pair"
    key = read_guarded(path, "a file with a secret key", advice, secret=True).strip()
    if flaw := _flaw(key.decode("latin-1")):
        raise bad(str(path), f"a key of {_CHARACTERS} characters of Z85", flaw, advice)
    pair = KeyPair(zmq.curve_public(key), key)
    _check_public_of(pair, path.with_name(PUBLIC))
    return pair


def read_guarded(path: Path, what: str, advice: str, secret: bool = False) -> bytes:
    """Read a file that others may not change nor, if it is `secret`, read; raises LocalError(OUT_OF_RANGE)."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            status = os.fstat(file.fileno())
            if not stat.S_ISREG(status.st_mode):
                raise bad(str(path), what, "no regular file", advice)
            _check_writers(path, "file", status)
            if secret:
                _check_readers(path, status)
                for folder in (path.parent, path.resolve().parent):
                    _check_writers(folder, "directory", folder.stat())
                for entry in _entries(path):
                    _check_owner(entry, "file", entry.lstat())
            if status.st_size > MOST_BYTES:
                raise bad(str(path), f"a file of at most {MOST_BYTES} bytes", f"{status.st_size} bytes", advice)
            return file.read(MOST_BYTES)
    except OSError as error:
        raise bad(str(path), what, str(error.strerror), advice) from error


def read_tables(
    path: Path, what: str, advice: str, name: str, fields: Sequence[str]
) -> Iterator[tuple[str, dict[str, Any]]]:
    """The place and content of each [[name]] of a guarded TOML file; raises LocalError for other tables or fields."""
    text = read_guarded(path, what, advice)
    try:
        table = tomllib.loads(text.decode())
    except ValueError as error:
        raise bad(str(path), "TOML", str(error), "correct it") from error
    rows = table.get(name, [])
    if table.keys() - {name} or not isinstance(rows, list):
        advice = f"one [[{name}]], in double brackets, for each {name}"
        raise bad(str(path), f"tables [[{name}]]", ", ".join(f"[{name}]" for name in table), advice)
    for i, row in enumerate(rows):
        at = f"{path}: {name}[{i}]"
        check_type(at, row, dict, f"a table [[{name}]]")
        if unknown := row.keys() - {*fields}:
            raise bad(at, ", ".join(fields), repr(min(unknown)), "correct it")
        yield at, row


def _entries(path: Path) -> Iterator[Path]:
    """The symbolic links by which a file is reached from its directory, as in a mounted Secret, and the file."""
    while path.is_symlink():
        yield path
        target = Path(os.readlink(path))
        if len(target.parts) > 1 and not target.is_absolute():
            yield path.parent / target.parts[0]
        path = path.parent / target
    yield path


def _check_readers(path: Path, status: os.stat_result) -> None:
    """Raise LocalError if others may read a file; groups of this process may read one of root's, as kubelet writes."""
    ours = status.st_uid == 0 and status.st_gid in (os.getegid(), *os.getgroups())
    if status.st_mode & (0o007 if ours else 0o077):
        mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
        advice = f"chmod 600 {path}; for a Secret of Kubernetes, defaultMode: 0400, or 0440 with fsGroup"
        raise bad(str(path), "a file that only its owner may read, mode 0600", mode, advice)


def _check_owner(path: Path, kind: str, status: os.stat_result) -> None:
    """Raise LocalError if another user owns a file or directory."""
    if status.st_uid not in (0, os.geteuid()):
        advice = f"chown {os.geteuid()} {path}, once nothing in it is from its owner"
        raise bad(str(path), f"a {kind} of this user or of root", f"one of user {status.st_uid}", advice)


def _check_writers(path: Path, kind: str, status: os.stat_result) -> None:
    """Raise LocalError if another user owns a file or directory, or may write to it by group or other permissions.

    In a sticky directory, others can only add what is not read.
    """
    _check_owner(path, kind, status)
    sticky = kind == "directory" and status.st_mode & stat.S_ISVTX
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not sticky:
        advice = f"chmod go-w {path}"
        mode = f"mode {stat.S_IMODE(status.st_mode):04o}"
        raise bad(str(path), f"a {kind} that no other user may write to", mode, advice)


def _check_public_of(pair: KeyPair, path: Path) -> None:
    """Raise LocalError if there is a public.key of another pair."""
    try:
        with open(path, "rb", opener=_at_once) as file:
            stated = file.read(_CHARACTERS + 2).strip()
    except FileNotFoundError:
        return
    except OSError as error:
        raise bad(str(path), "a file with a public key", str(error.strerror), "make it readable") from error
    if stated != pair.public:
        advice = f"one of {SECRET} and {PUBLIC} is from elsewhere: restore it, or remove {PUBLIC}"
        raise bad(str(path), f"the public key of {SECRET}, {pair.public.decode()}", "another", advice)


def _at_once(path: str, flags: int) -> int:
    """An opener that never blocks, as opening a FIFO otherwise would."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def check_public(path: str, key: object) -> bytes:
    """A public key as bytes; raises LocalError(OUT_OF_RANGE), which names `path`."""
    flaw = _flaw(key) if isinstance(key, str) else type(key).__name__
    if flaw or not isinstance(key, str):
        raise bad(path, f"a public key, {_CHARACTERS} characters of Z85", flaw, f"copy it from {PUBLIC}")
    return key.encode()


def _flaw(text: str) -> str:
    """The reason that a text is no key, without repeating it; empty if it is one."""
    if len(text) != _CHARACTERS:
        return f"{len(text)} characters"
    if strange := sum(character not in _ALPHABET for character in text):
        return f"{_CHARACTERS} characters, {strange} of them not of Z85"
    try:
        z85.decode(text.encode())
    except struct.error:
        return f"{_CHARACTERS} characters of which five in a row stand for more than 32 bits, so one is mistaken"
    return ""
