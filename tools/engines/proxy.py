"""The smallest router that prefill and decode engines need: `python -m tools.engines.proxy PORT PREFILL DECODE`.

It sends each completion to prefill first, for one token, and its `kv_transfer_params` with the request to decode. It
knows nothing of kvproto: what it says is what vLLM's own example says for any connector.
"""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import urllib.error
import urllib.request
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_TO_PREFILL = {
    "do_remote_decode": True, "do_remote_prefill": False, "remote_engine_id": None, "remote_block_ids": None,
    "remote_host": None, "remote_port": None,
}  # fmt: skip


def _post(url: str, body: dict[str, Any]) -> tuple[int, dict[str, Any]]:
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


class _Handler(BaseHTTPRequestHandler):
    prefill = decode = ""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        first = body | {"max_tokens": 1, "stream": False, "kv_transfer_params": _TO_PREFILL}
        status, answer = _post(self.prefill + self.path, first)
        if status == 200:
            params = {"kv_transfer_params": found} if (found := answer.get("kv_transfer_params")) else {}
            status, answer = _post(self.decode + self.path, body | params)
        data = json.dumps(answer).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *args: Any) -> None:
        """Say nothing."""


def main(argv: list[str]) -> int:
    """Serve until interrupted."""
    port, _Handler.prefill, _Handler.decode = int(argv[0]), *argv[1:]
    signal.signal(signal.SIGINT, signal.default_int_handler)  # which background processes ignore from birth
    with contextlib.suppress(KeyboardInterrupt):
        ThreadingHTTPServer(("127.0.0.1", port), _Handler).serve_forever()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
