"""The identity of a request at both engines: the digest of its prompt, and the ticket that comes with it."""

import hashlib
import secrets
from array import array
from collections.abc import Iterable, Mapping
from functools import cached_property
from pathlib import Path
from types import NoneType
from typing import Any

import attrs
import numpy as np
import numpy.typing as npt

from kvproto.errors import U32, WireError, bad, check_text, check_type, check_whole, type_name
from kvproto.planning.kinds import TOKENS
from kvproto.wire import encode_struct, from_json, tables, to_json
from kvproto.wire.enums import ErrorCode
from kvproto.wire.messages import Axis, Content, Ticket
from kvproto.wire.plain import read_json

__all__ = [
    "Prompt", "Ticket", "adapter_digest", "check_name", "new_ticket", "read_ticket", "tenant_digest", "write_ticket",
]  # fmt: skip

_LONGEST_NAME = next(most for _, name, *_, most, _ in tables.FIELDS["Ticket"] if name == "engine")
"""The most bytes in an engine's name, as in the registry."""
_MOST_TOKENS = tables.MAX_BODY // 4
"""As many token ids as the longest body has room for, 4 bytes each."""
_LONGEST_AXIS = next(most for _, name, *_, most, _ in tables.FIELDS["Axis"] if name == "name" and most)
"""The most bytes in the name of an axis."""
_LONGEST_TEXT = 1 << 12
"""The most characters in a ticket as JSON: several times as many as any ticket has."""
_ADAPTER_FILES = "adapter_config.json", "adapter_model.safetensors"
"""The files of a LoRA adapter in the form of Hugging Face's PEFT."""


@attrs.frozen(init=False, eq=False)
class Prompt:
    """The input of a request: token ids, the adapter, and digests of other inputs such as images.

    Both engines compute its `digest`; if their prompts differ anywhere, the transfer is refused before a byte moves
    (KVP-TKT-CONTENT).
    """

    tokens: npt.NDArray[np.uint32] = attrs.field(repr=False)
    """Token ids, uint32 [tokens]."""
    adapter: str
    """The name of the LoRA adapter; empty for none."""
    salts: tuple[bytes, ...] = attrs.field(repr=False)
    """Digests of inputs that are not tokens, 32 bytes each: of the adapter's weights, of images in the order of the
    prompt, of the tenant's salt."""
    axes: Mapping[str, int]
    """The number of positions on each axis other than the tokens, such as "image" for all images in turn."""

    def __init__(
        self,
        tokens: Iterable[int],
        adapter: str = "",
        salts: Iterable[bytes] = (),
        axes: Mapping[str, int] | None = None,
    ) -> None:
        """Take token ids, [tokens], from any sequence or array of integers.

        `axes` states the length of every axis that a cache of either side names, 0 if the request has nothing on it.
        Raises LocalError(OUT_OF_RANGE), which names the wrong element.
        """
        check_type("Prompt.adapter", adapter, str, "the adapter's name, a str")
        if isinstance(salts, str | bytes) or not isinstance(salts, Iterable):
            raise bad("Prompt.salts", "a sequence of digests", type_name(salts))
        digests = []
        for i, salt in enumerate(salts):
            path, wanted = f"Prompt.salts[{i}]", "32 bytes, such as a SHA-256"
            check_type(path, salt, (bytes, bytearray, memoryview), wanted)
            digests.append(bytes(salt))
            if len(digests[i]) != 32:
                raise bad(path, wanted, f"{len(digests[i])} bytes")
        self.__attrs_init__(_token_ids(tokens), adapter, tuple(digests), _axes(axes))

    def __len__(self) -> int:
        """The number of tokens."""
        return int(self.tokens.size)

    @cached_property
    def digest(self) -> bytes:
        """SHA-256 of the canonical Content, 32 bytes."""
        axes = tuple(Axis(name=name, length=length) for name, length in self.axes.items())
        content = Content(tokens=self.tokens, adapter=self.adapter, salts=self.salts, axes=axes or None)
        return hashlib.sha256(encode_struct(content)).digest()


def _axes(axes: Any) -> dict[str, int]:
    """Lengths by the axis's name, in the order of names."""
    check_type("Prompt.axes", axes, (Mapping, NoneType), 'a mapping of axis to its length, such as {"image": 576}')
    lengths = {}
    for name, length in (axes or {}).items():
        path = f"Prompt.axes[{name!r}]"
        check_type(path, name, str, "the name of an axis, a str")
        if name == TOKENS or not 0 < len(check_text("Prompt.axes", name)) <= _LONGEST_AXIS:
            raise bad(path, f"a name of 1 to {_LONGEST_AXIS} bytes other than {TOKENS!r}", repr(name))
        lengths[name] = check_whole(path, length, 0, mine="positions on this axis")
    return dict(sorted(lengths.items(), key=lambda axis: axis[0].encode()))


def _token_ids(tokens: Any) -> npt.NDArray[np.uint32]:
    ids = _of_list(tokens)
    return _of_any(tokens) if ids is None else ids


def _of_list(tokens: Any) -> npt.NDArray[np.uint32] | None:
    """The ids of a list, as engines have them; None if it may be wrong, or is another sequence.

    In a fourth of numpy's time, and without its releases of the interpreter's lock: an engine's thread that reads the
    next prompt keeps the lock for milliseconds.
    """
    if not isinstance(tokens, list) or not 0 < len(tokens) <= _MOST_TOKENS or isinstance(tokens[0], bool):
        return None
    try:
        return np.frombuffer(array("I", tokens), np.uint32)
    except (TypeError, OverflowError):
        return None


def _of_any(tokens: Any) -> npt.NDArray[np.uint32]:
    """The ids of any sequence; raises LocalError(OUT_OF_RANGE)."""
    try:
        ids = np.asarray(tokens if hasattr(tokens, "__array__") else list(tokens))
    except (TypeError, ValueError) as error:
        raise bad("Prompt.tokens", "a sequence of integers", f"{type(tokens).__name__}: {error}") from error
    if ids.ndim != 1 or not ids.size:
        raise bad("Prompt.tokens", "at least one token id, in one dimension", f"shape {ids.shape}")
    if ids.size > _MOST_TOKENS:
        raise bad("Prompt.tokens", f"at most {_MOST_TOKENS} tokens", str(ids.size))
    if ids.dtype.kind not in "iu":
        raise bad("Prompt.tokens", "integers", f"elements of type {ids.dtype}")
    wrong = np.flatnonzero((ids < 0) | (ids > U32))
    if wrong.size:
        raise bad(f"Prompt.tokens[{wrong[0]}]", f"0 to {U32}", str(ids[wrong[0]]))
    return ids.astype(np.uint32)


def adapter_digest(folder: Path | str) -> bytes:
    """SHA-256 of a LoRA adapter in PEFT's form, 32 bytes: of its two files, each after its length as a u64.

    As one of `Prompt.salts` it tells adapters of one name apart; in hex it is `adapter` of a page's namespace. Raises
    LocalError(OUT_OF_RANGE) where a file cannot be read.
    """
    made = hashlib.sha256(b"kvproto adapter 1\0")
    for name in _ADAPTER_FILES:
        path = Path(folder) / name
        try:
            with path.open("rb") as file:
                made.update(path.stat().st_size.to_bytes(8, "little"))
                while piece := file.read(1 << 20):
                    made.update(piece)
        except OSError as error:
            files = " and ".join(_ADAPTER_FILES)
            raise bad("adapter", f"a folder with {files}", f"{path}: {error.strerror}") from error
    return made.digest()


def tenant_digest(salt: str) -> bytes:
    """SHA-256 of a tenant's `cache_salt`, 32 bytes, for `Prompt.salts`: a prompt of another tenant is another one."""
    return hashlib.sha256(b"kvproto salt 1\0" + salt.encode(errors="surrogatepass")).digest()


def new_ticket(engine: str, replica: int = 0, deadline: float = 60.0) -> Ticket:
    """Make a ticket for one request whose prompt `engine` computes, valid for `deadline` seconds (KVP-TKT-KEY).

    A router makes it and passes it to both engines with the prompt; another try of the request needs a new one. The
    source counts the deadline from `Source.request`, the sink from `Sink.fetch`. Raises LocalError(OUT_OF_RANGE).
    """
    check_type("engine", engine, str, "the source engine's name, a str")
    check_name("engine", engine)
    check_type("deadline", deadline, (int, float), "seconds")
    replica = check_whole("replica", replica, 0)
    if not 0 < deadline <= U32 / 1000:
        raise bad("deadline", f"seconds, above 0 and up to {U32 // 1000}", str(deadline))
    milliseconds = max(int(deadline * 1000), 1)
    return Ticket(key=secrets.token_bytes(16), engine=engine, replica=replica, deadline=milliseconds)


def check_name(argument: str, name: str) -> None:
    """Raise LocalError(OUT_OF_RANGE) if an engine's name is empty or longer than the wire format allows."""
    length = len(check_text(argument, name))
    if length < 1 or (_LONGEST_NAME is not None and length > _LONGEST_NAME):
        raise bad(argument, f"1 to {_LONGEST_NAME} bytes in UTF-8", f"{length} bytes")


def write_ticket(ticket: Ticket) -> dict[str, Any]:
    """The JSON form of a ticket (spec/v1/json.md), which includes its secret key; raises LocalError(OUT_OF_RANGE)."""
    check_type("ticket", ticket, Ticket, "a kvproto.Ticket")
    form: dict[str, Any] = to_json(ticket)
    return form


def read_ticket(form: Mapping[str, Any] | str | bytes) -> Ticket:
    """The ticket of a JSON form, as a mapping or text; raises WireError, and LocalError for anything but an object."""
    mapping: Any = form
    if isinstance(form, str | bytes):
        if len(form) > _LONGEST_TEXT:
            raise WireError(ErrorCode.TOO_LARGE, "ticket", f"at most {_LONGEST_TEXT} characters", str(len(form)))
        mapping = read_json(form, "ticket")
    check_type("ticket", mapping, Mapping, "what write_ticket returned, or its JSON text")
    return from_json(Ticket, dict(mapping))
