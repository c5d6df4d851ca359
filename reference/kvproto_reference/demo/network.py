"""Keys, an allow-list and ports for engines that meet over TCP, as an operator would make them."""

import socket
from contextlib import ExitStack
from pathlib import Path

from kvproto.net import make_keys

from ..errors import EngineError
from .options import rank_address

_TRIES = 100


def tcp(folder: Path, replicas: int, ranks: int, host: str = "127.0.0.1") -> tuple[str, Path, Path]:
    """Where prefill rank 0 listens, and the key folders of both engines; only the decode engine may connect."""
    prefill, decode = folder / "prefill-keys", folder / "decode-keys"
    make_keys(prefill)
    public = make_keys(decode).public.decode()
    (prefill / "allow.toml").write_text(f'[[client]]\nkey = "{public}"\nengine = "decode"\n')
    return _free(host, replicas, ranks), prefill, decode


def _free(host: str, replicas: int, ranks: int) -> str:
    """An address whose ports, of all replicas and ranks, are free."""
    for _ in range(_TRIES):
        with ExitStack() as stack:
            first = stack.enter_context(socket.socket())
            first.bind((host, 0))
            address = f"tcp://{host}:{first.getsockname()[1]}"
            try:
                for place in range(1, replicas * ranks):
                    other = rank_address(address, *divmod(place, ranks))
                    stack.enter_context(socket.socket()).bind((host, int(other.rpartition(":")[2])))
            except (OSError, EngineError):
                continue
            return address
    raise EngineError(f"no {replicas * ranks} free ports at {host}")
