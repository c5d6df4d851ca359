"""File descriptors of virtual device memory, for peers of this user that send the 16 random bytes of Register."""

import atexit
import os
import secrets
import shutil
import socket
import struct
import tempfile
import threading
from functools import cache

_PATIENCE = 5.0
"""Seconds that one exchange may take."""


class _Server:
    def __init__(self) -> None:
        self._folder = tempfile.mkdtemp(prefix="kvproto-")  # mode 0700
        self.path = os.path.join(self._folder, "descriptors")
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.bind(self.path)
        os.chmod(self.path, 0o600)
        self._socket.listen(64)
        self.held: dict[bytes, int] = {}
        atexit.register(shutil.rmtree, self._folder, True)
        threading.Thread(target=self._serve, name="kvproto descriptors", daemon=True).start()

    def _serve(self) -> None:
        while True:
            peer, _ = self._socket.accept()
            # a thread for each peer, so that a silent one holds up no other
            threading.Thread(target=self._answer, args=(peer,), daemon=True).start()

    def _answer(self, peer: socket.socket) -> None:
        with peer:
            peer.settimeout(_PATIENCE)
            try:
                _, user, _ = struct.unpack("iii", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12))
                token = peer.recv(16, socket.MSG_WAITALL)
                held = self.held.get(token)
                if held is not None and user == os.getuid():
                    socket.send_fds(peer, [b"1"], [held])
            except OSError:
                pass


@cache
def _server() -> _Server:
    return _Server()


def offer(descriptor: int) -> tuple[str, bytes]:
    """Take over a descriptor; returns where peers of this host can get it, and the bytes that name it."""
    token = secrets.token_bytes(16)
    _server().held[token] = descriptor
    return _server().path, token


def withdraw(token: bytes) -> None:
    """Stop offering a descriptor, and close it."""
    descriptor = _server().held.pop(token, None)
    if descriptor is not None:
        os.close(descriptor)


def fetch(path: str, token: bytes) -> int:
    """A descriptor that a peer offers; raises OSError."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer:
        peer.settimeout(_PATIENCE)
        peer.connect(path)
        peer.sendall(token)
        peer.shutdown(socket.SHUT_WR)
        _, descriptors, _, _ = socket.recv_fds(peer, 1, 1)
    if not descriptors:
        raise OSError("no descriptor")
    return descriptors[0]
