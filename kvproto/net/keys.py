"""CURVE keys of engines: a folder with `secret.key`, for its owner's eyes, and `public.key`, for everybody's.

A key is a line of 40 characters in Z85, as ZeroMQ writes 32 bytes. Clause KVP-NET-SECRET.
"""

from __future__ import annotations

import os
import stat
import struct
from pathlib import Path

import attrs
import zmq
from zmq.utils import z85

from kvproto.errors import LocalError
from kvproto.wire.enums import ErrorCode

__all__ = ["PUBLIC", "SECRET", "KeyPair", "at_once", "check_public", "make_keys", "read_keys"]

SECRET, PUBLIC = "secret.key", "public.key"
_CHARACTERS = 40
_ALPHABET = frozenset(b"0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#")


@attrs.frozen
class KeyPair:
    """An engine's own keys, in Z85."""

    public: bytes
    secret: bytes = attrs.field(repr=False)


def make_keys(folder: Path) -> KeyPair:
    """Write a new pair into a folder, made with mode 0700 if missing; raises LocalError where there is one already."""
    public, secret = zmq.curve_keypair()
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        for name, key, mode in ((SECRET, secret, 0o600), (PUBLIC, public, 0o644)):
            made = os.open(folder / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode)
            with open(made, "wb") as file:
                file.write(key + b"\n")
    except FileExistsError as error:
        advice = "engines may be using it: choose another folder, or remove it first"
        raise _bad(str(error.filename), "a folder without keys", "there is one already", advice) from error
    except OSError as error:
        raise _bad(str(folder), "a folder to write to", str(error), "choose another folder") from error
    return KeyPair(public, secret)


def read_keys(folder: str | Path) -> KeyPair:
    """The pair whose secret lies in a folder; raises LocalError naming the file, and what would be right.

    Nobody else may write to the folder, and public.key, where there is one, is that of the secret (KVP-NET-SECRET).
    """
    path = Path(folder) / SECRET
    advice = f"`kvproto keygen {folder}` makes a pair"
    try:
        with open(path, "rb", opener=at_once) as file:
            mode, text = os.fstat(file.fileno()), file.read(_CHARACTERS + 2)
    except OSError as error:
        raise _bad(str(path), "a file with a secret key", str(error.strerror), advice) from error
    if stat.S_IMODE(mode.st_mode) & 0o077:
        found = f"mode {stat.S_IMODE(mode.st_mode):04o}"
        raise _bad(str(path), "a file that only its owner may read, mode 0600", found, f"chmod 600 {path}")
    if not _is_key(text.strip()):
        found = f"{len(text.strip())} characters" if len(text.strip()) < _CHARACTERS else "something else"
        raise _bad(str(path), f"a key of {_CHARACTERS} characters of Z85", found, advice)
    pair = KeyPair(zmq.curve_public(text.strip()), text.strip())
    _check_folder(path.parent, pair.public)
    return pair


def _check_folder(folder: Path, public: bytes) -> None:
    mode, path = stat.S_IMODE(folder.stat().st_mode), folder / PUBLIC
    if mode & stat.S_IWOTH:
        advice = f"chmod o-w {folder}" if not mode & stat.S_ISVTX else "keep the keys in a directory of their own"
        raise _bad(str(folder), "a directory that no other user may write to", f"mode {mode:04o}", advice)
    try:
        with open(path, "rb", opener=at_once) as file:
            stated = file.read(_CHARACTERS + 2).strip()
    except FileNotFoundError:
        return
    except OSError as error:
        raise _bad(str(path), "a file with a public key", str(error.strerror), "make it readable") from error
    if stated != public:
        advice = f"one of {SECRET} and {PUBLIC} is from elsewhere: restore it, or remove {PUBLIC}"
        raise _bad(str(path), f"the public key of {SECRET}, {public.decode()}", "another", advice)


def at_once(path: str, flags: int) -> int:
    """An opener that does not wait, as opening a FIFO would."""
    return os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC)


def check_public(path: str, given: object) -> bytes:
    """A public key as bytes; raises LocalError(OUT_OF_RANGE) at this path."""
    key = given.encode() if isinstance(given, str) else b""
    if not _is_key(key):
        raise _bad(path, f"a public key, {_CHARACTERS} characters of Z85", _short(given), f"copy it from {PUBLIC}")
    return key


def _is_key(text: bytes) -> bool:
    if len(text) != _CHARACTERS or not _ALPHABET.issuperset(text):
        return False
    try:
        return bool(z85.decode(text))
    except struct.error:  # five characters that stand for more than 32 bits
        return False


def _short(given: object) -> str:
    return f"{len(given)} characters" if isinstance(given, str) else type(given).__name__


def _bad(path: str, mine: str, yours: str, advice: str) -> LocalError:
    return LocalError(ErrorCode.OUT_OF_RANGE, path, mine, yours, advice)
