"""`kvproto-router`: OpenAI's completions and chat completions over HTTP, streamed or whole."""

from __future__ import annotations

import argparse
import contextlib
import json
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from kvproto import Finder
from kvproto.errors import KvprotoError

from ..chat import ChatTemplate
from ..checkpoint import load_tokenizer
from ..demo.options import checkpoint_folder, private_folder, rank_address
from ..demo.prompts import Prompt
from ..engine.sampling import SamplingParams
from ..errors import EngineError
from ..moving.router import PeerRouter
from ..moving.verbs import Verbs
from .balance import BalancedRouter
from .form import Form
from .service import Service, Told, WrongRequest

_LONGEST = 4 << 20
"""The most bytes of a request."""
_SAMPLING = {
    "temperature": "temperature", "seed": "seed", "top_p": "top_p", "top_k": "top_k", "stop": "stop",
    "presence_penalty": "presence", "frequency_penalty": "frequency", "repetition_penalty": "repetition",
    "ignore_eos": "ignore_eos",
}  # fmt: skip
"""Fields of a request and what they are called here; others are ignored, but for `n`."""


class RouterServer(ThreadingHTTPServer):
    """The HTTP server of one service."""

    daemon_threads = True
    request_queue_size = 256
    verbs: Verbs | None = None
    """Answers to POST /admin/... from this host, for engines that can do both."""

    def __init__(self, address: tuple[str, int], service: Service, model: str, folder: Path) -> None:
        """Answer for a model whose checkpoint is in `folder`; raises EngineError if the address is in use."""
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        self.service, self.model, self.tokenizer = service, model, load_tokenizer(folder)
        self.template: ChatTemplate | None = None
        with contextlib.suppress(EngineError):
            self.template = ChatTemplate(folder)
        try:
            super().__init__(address, _Handler)
        except OSError as error:
            raise EngineError(f"--http {address[0]}:{address[1]} cannot be listened at: {error.strerror}") from error

    def tokens(self, given: Any) -> list[int]:
        """The tokens of a prompt, a text or token ids; raises EngineError."""
        if isinstance(given, str) and given:
            return self.tokenizer.encode(given.encode())
        if isinstance(given, list) and given and all(isinstance(t, int) and 0 <= t < 1 << 31 for t in given):
            return given
        raise EngineError("prompt is a text or a list of token ids, not empty")

    def handle_error(self, request: Any, client_address: Any) -> None:
        """A client that goes away is no error of the router."""


class _Handler(BaseHTTPRequestHandler):
    server: RouterServer
    protocol_version = "HTTP/1.1"
    timeout = 60.0

    def do_GET(self) -> None:
        """Answer for the router itself."""
        service = self.server.service
        if self.path == "/v1/models":
            self._json(200, {"object": "list", "data": [{"id": self.server.model, "object": "model"}]})
        elif self.path == "/health":
            self._json(503 if service.failure else 200, {"error": service.failure} if service.failure else {})
        elif self.path == "/ready":
            counts = {name: getattr(service, name) for name in ("served", "lost", "retried", "under_way")}
            roles = {"roles": service.roles} if self.server.verbs is not None else {}
            self._json(200 if service.open else 503, {"ready": service.open, "engines": service.why, **counts, **roles})
        else:
            self._refuse(404, "GET /v1/models, /health or /ready")

    def do_POST(self) -> None:
        """Answer a completion, or do what an operator of this host asks for."""
        if self.server.verbs is not None and (verb := self.server.verbs.paths.get(self.path)) is not None:
            self._do(verb)
            return
        chat = {"/v1/completions": False, "/v1/chat/completions": True}.get(self.path)
        if chat is None:
            self.close_connection = True  # its body is not read
            self._refuse(404, "POST /v1/completions or /v1/chat/completions")
            return
        try:
            body = self._body()
            if body.get("n", 1) != 1:
                raise EngineError("n is 1: ask several times")
            if body.get("model") not in (None, self.server.model):
                self._refuse(404, f"the model here is {self.server.model}, not {body['model']!r}")
                return
            prompt, most, stream = self._prompt(body, chat), body.get("max_tokens", 16), bool(body.get("stream"))
            if isinstance(most, bool) or not isinstance(most, int) or not 0 < most < 1 << 31:
                raise EngineError(f"max_tokens is a number of tokens, at least 1, not {most!r}")
        except (EngineError, TypeError) as error:
            self._refuse(400, str(error))
            return
        form = Form(self.server.model, chat, self.server.tokenizer, prompt, most)
        tokens = self.server.service.ask(prompt, most)
        try:
            with contextlib.closing(tokens):
                if stream:
                    self._stream(form, tokens)
                else:
                    for some in tokens:
                        form.take(some)
                    self._json(200, form.whole())
        except EngineError as error:
            self._refuse(400 if isinstance(error, WrongRequest) else 503, str(error))
        except OSError:  # the client has gone, and its request with it
            self.close_connection = True

    def _do(self, verb: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
        try:
            body = self._body()
            client = ip_address(self.client_address[0].partition("%")[0])
            if not (getattr(client, "ipv4_mapped", None) or client).is_loopback:
                self._refuse(403, f"POST {self.path} is for clients of this host")
                return
            self._json(200, verb(body))
        except EngineError as error:
            self._refuse(400, str(error))

    def _body(self) -> dict[str, Any]:
        """The request; raises EngineError."""
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LONGEST:
            self.close_connection = True
            raise EngineError(f"Content-Length is needed, at most {_LONGEST}")
        try:
            body = json.loads(self.rfile.read(int(length)))
        except (ValueError, RecursionError) as error:
            raise EngineError(f"the request is no JSON: {error}") from None
        if not isinstance(body, dict):
            raise EngineError("the request is a JSON object")
        return body

    def _prompt(self, body: dict[str, Any], chat: bool) -> Prompt:
        said = {here: body[there] for there, here in _SAMPLING.items() if body.get(there) is not None}
        likeliest = body.get("logprobs")
        if chat:
            likeliest = body.get("top_logprobs", 0) if likeliest is True else None
        sampling, given = SamplingParams.of(said | {"logprobs": likeliest}), body.get("messages" if chat else "prompt")
        if chat:
            if self.server.template is None:
                raise EngineError("the model has no chat template: use /v1/completions")
            turn = isinstance(given, list) and given and all(
                isinstance(each, dict) and isinstance(each.get("content"), str) for each in given
            )  # fmt: skip
            if not turn or not isinstance(given, list):
                raise EngineError("messages is a list of objects with a role and a content, a text")
            given = self.server.template.conversation(given)
        return Prompt(name="", tokens=self.server.tokens(given), sampling=sampling)

    def _stream(self, form: Form, tokens: Iterator[Told]) -> None:
        """Send what comes as it comes; an answer that is lost midway ends with an error and no [DONE]."""
        some = next(tokens, None)  # until now it may be refused
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            while some:
                self._event(form.chunk(form.take(some), some))
                some = next(tokens, None)
            self._event(form.chunk(form.rest(), ended=form.ended))
            self.wfile.write(b"data: [DONE]\n\n")
        except EngineError as error:
            self._event(_error(503, str(error)))

    def _event(self, said: dict[str, Any]) -> None:
        self.wfile.write(b"data: " + json.dumps(said).encode() + b"\n\n")

    def _refuse(self, status: int, why: str) -> None:
        self._json(status, _error(status, why))

    def _json(self, status: int, said: dict[str, Any]) -> None:
        data = json.dumps(said).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: object) -> None:
        """Requests are counted, not logged."""


def _error(status: int, why: str) -> dict[str, Any]:
    kind = "invalid_request_error" if status < 500 else "server_error"
    return {"error": {"message": why, "type": kind, "code": status}}


def router_parser() -> argparse.ArgumentParser:
    """The command line of `kvproto-router`."""
    parser = argparse.ArgumentParser(prog="kvproto-router", description="Router of kvproto's reference engines.")
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="private directory that the engines use too")
    add("--http", default="127.0.0.1:8000", metavar="HOST:PORT", help="where to answer (default 127.0.0.1:8000)")
    add("--prefill", type=int, default=1, metavar="N", help="prefill engines, --replica 0 to N-1 (default 1)")
    add("--decode", type=int, default=1, metavar="N", help="decode engines, likewise (default 1)")
    both = "engines that can do both (kvproto-engine), --replica 0 to N-1; in place of --prefill and --decode"
    add("--engines", type=int, metavar="N", help=both)
    add("--source", default="prefill", metavar="NAME", help="name of the prefill engines (default prefill)")
    add("--target", "--model", dest="target", default="mla", metavar="DIR", help="target of the engines (default mla)")
    add("--find", action="store_true", help="ask prefill engines with --host-pages which prompts they keep (ipc)")
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    args = router_parser().parse_args(argv)
    host, _, port = args.http.rpartition(":")
    try:
        if not host or not port.isdecimal() or args.prefill < 1 or args.decode < 1:
            raise EngineError("--http is HOST:PORT, and --prefill and --decode are at least 1")
        if args.engines is not None and (args.engines < 2 or args.find):
            raise EngineError(
                "--engines is at least 2, without --find: those of --engines keep pages on the device alone"
            )
        folder = private_folder(args.dir)
        with contextlib.ExitStack() as stack:
            finder: Finder | None = None
            if args.find:
                places = [rank_address(f"ipc://{folder / 'kv'}", n, 0) for n in range(args.prefill)]
                finder = stack.enter_context(Finder(places))
            peers = None if args.engines is None else PeerRouter(folder, args.engines)
            service = Service(peers or BalancedRouter(folder, args.source, args.prefill, args.decode, finder))
            stack.callback(service.close)
            address = host.strip("[]"), int(port)
            server = stack.enter_context(
                RouterServer(address, service, args.target, checkpoint_folder("target", args.target))
            )
            server.verbs = None if peers is None else Verbs(peers, service, server.tokens)
            signal.signal(signal.SIGTERM, lambda *_: threading.Thread(target=server.shutdown).start())
            print(f"listens at http://{host}:{server.server_port}", file=sys.stderr, flush=True)
            with contextlib.suppress(KeyboardInterrupt):
                server.serve_forever()
        return 0
    except (EngineError, KvprotoError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
