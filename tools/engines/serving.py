"""The servers of the pages that are followed as a user would: where they listen, and when they are ready."""

from __future__ import annotations

import socket
import subprocess
import time
import urllib.request

_PATIENCE = 800.0
"""Seconds that a server may take to start."""
ANSWERS, ENDS = 300.0, 120.0
"""Seconds that it may take to answer a request, and to end once it is interrupted."""


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait(port: int | str, running: list[subprocess.Popen[bytes]], path: str = "health") -> None:
    """Until a server answers at this path, empty: listens; raises RuntimeError where one has ended, or TimeoutError."""
    until = time.monotonic() + _PATIENCE
    while time.monotonic() < until:
        if any(process.poll() is not None for process in running):
            raise RuntimeError("a server has ended")
        try:
            if not path:
                socket.create_connection(("127.0.0.1", int(port)), 1).close()
                return
            with urllib.request.urlopen(f"http://localhost:{port}/{path}", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    raise TimeoutError(f"nothing listens on port {port}")
