"""`kvproto-encode`: an engine of its own for images, whose ranks hand the rows that they make over to prefill."""

import argparse
import sys
from collections import deque
from pathlib import Path
from typing import Any

import attrs

from kvproto import Options, Parallel, Request, Source, read_ticket
from kvproto.errors import DeviceFault, KvprotoError
from kvproto.events import Event, Expired, Freed, Refused, Sent, Undelivered

from ..checkpoint import load_config
from ..engine.images import ROWS, RUN, Image, RowPool, shown
from ..engine.launch import launch
from ..engine.lockstep import Lockstep, Said
from ..engine.world import World
from ..errors import EngineError, code_of
from ..models import TensorParallel
from ..models.encoder import Encoder, EncoderConfig
from .control import Control
from .options import TRANSPORT_HELP, checkpoint_folder, private_folder, rank_address

NAME = "encoder"


@attrs.frozen(kw_only=True)
class EncodeOptions:
    """The options of an encoder engine."""

    dir: Path
    """Private directory of the control socket, and of the ipc addresses."""
    tp: int
    target: str
    dtype: str
    seed: int
    """Of the weights."""
    pages: int
    transport: str
    no_verify: bool


@attrs.define(eq=False)
class _Job:
    """The images of one request."""

    id: str
    request: Request
    images: list[Image]
    pages: list[int] | None = None
    """Its pages, once it is encoded."""
    needed: set[int] = attrs.Factory(set)
    """Ranks that have to report it over: all, until one says which have a route."""
    over: set[int] = attrs.Factory(set)


class EncodeProcess:
    """One rank of an encoder. All ranks hear each word in the same order, and encode each image together."""

    def __init__(self, options: EncodeOptions, world: World) -> None:
        target = load_config(checkpoint_folder("target", options.target), options.dtype)
        self._encoder = Encoder(
            EncoderConfig(width=target.hidden, seed=options.seed), TensorParallel(world.rank, world.size, world.group)
        )
        dealt = Parallel(tp=world.size, dcp=world.size, interleave=RUN)
        self._rows = RowPool(self._encoder.config, target, dealt, world.rank, options.pages)
        listen = {rank: rank_address(address(options.dir), 0, rank) for rank in range(world.size)}
        how = Options(transports=(options.transport,), verify=not options.no_verify)
        self._source = Source(NAME, self._rows.pool, listen, how)
        self._world, self._lockstep = world, Lockstep(world)
        self._control = None if world.rank else Control(options.dir, f"{NAME}-0")
        self._jobs: dict[str, _Job] = {}
        self._waiting: deque[_Job] = deque()
        self._ended = False

    def serve(self) -> int:
        """Serve until the router says stop."""
        try:
            while not self._ended:
                fds = [self._source.fileno(), *([self._control.fileno()] if self._control is not None else ())]
                if not self._lockstep.wait(fds, None, self._control is not None and self._control.pending):
                    continue
                for rank, said in enumerate(self._lockstep.exchange(self._hear())):
                    for word in said:
                        getattr(self, "on_" + word["op"])(rank, word)
                self._encode()
        finally:
            self._source.close("stopped" if self._ended else "ended by an error")
            if self._control is not None:
                self._control.close()
        return 0

    def _hear(self) -> Said:
        said = [word for event in self._source.events() for word in self._words(event)]
        return said + (self._control.receive() if self._control is not None else [])

    def _words(self, event: Event) -> Said:
        ids = {job.request: job.id for job in self._jobs.values()}
        match event:
            case Sent(request) if request in ids:
                return [{"op": "sent", "id": ids[request], "sink": event.sink, "bytes": event.bytes[ROWS]}]
            case Freed(request) | Undelivered(request) if request in ids:
                return [{"op": "over", "id": ids[request], "needed": list(event.routed)}]
            case Expired(request) if request in ids:
                return [{"op": "over", "id": ids[request], "needed": list(range(self._world.size))}]
            case Refused():
                mine = f"{NAME} rank {self._world.rank}"
                print(f"{mine} refused {event.peer}: {event.error.between(mine, event.peer)}", file=sys.stderr)
        return []

    def _tell(self, op: str, **fields: Any) -> None:
        if self._control is not None:
            self._control.send(op, **fields)

    def on_hello(self, rank: int, word: dict[str, Any]) -> None:
        """The router greets: this engine is ready."""
        self._tell("ready")

    def on_encode(self, rank: int, word: dict[str, Any]) -> None:
        """Take the images of a request, or tell the router why not."""
        try:
            images = [Image.of_word(image) for image in word["images"]]
            prompt = shown(word["prompt"], images, self._encoder.config)
            self._rows.check(prompt)
            request = self._source.request(read_ticket(word["ticket"]), prompt)
        except (KvprotoError, EngineError) as error:
            self._tell("refused", id=word["id"], error=str(error), code=code_of(error))
            return
        job = self._jobs[word["id"]] = _Job(word["id"], request, images, needed=set(range(self._world.size)))
        self._waiting.append(job)

    def _encode(self) -> None:
        """Encode the images there are pages for, in turn."""
        while self._waiting and (pages := self._rows.take(self._waiting[0].request.prompt)) is not None:
            job = self._waiting.popleft()
            job.pages = pages
            if (rows := self._encoder.rows(image.pixels for image in job.images)) is not None:
                self._rows.write(pages, rows)
            job.request.finish({ROWS: pages})

    def on_sent(self, rank: int, word: dict[str, Any]) -> None:
        """A rank has copied its rows to one rank of prefill."""
        count = word["bytes"]
        rows = count // (self._rows.tensor.shape[-1] * self._rows.tensor.itemsize)
        self._tell("rows", id=word["id"], source=rank, sink=word["sink"], rows=rows, bytes=count)

    def on_over(self, rank: int, word: dict[str, Any]) -> None:
        """No sink needs a rank's rows any more; ranks without a route hear nothing and are not waited for."""
        if (job := self._jobs.get(word["id"])) is None:
            return
        job.over.add(rank)
        job.needed &= set(word["needed"]) or job.needed
        if job.over >= job.needed:
            del self._jobs[job.id]
            if job in self._waiting:
                self._waiting.remove(job)
            self._rows.pages.free(job.pages or ())

    def on_drop(self, rank: int, word: dict[str, Any]) -> None:
        """The router has given the request up."""
        if (job := self._jobs.get(word["id"])) is not None:
            job.request.fail("dropped by the router")

    def on_stop(self, rank: int, word: dict[str, Any]) -> None:
        """The router stops the engine."""
        self._tell("stopped")
        self._ended = True


def address(folder: Path) -> str:
    """The address of the encoder engine of a folder: `rank_address` derives that of each rank."""
    return f"ipc://{folder}/rows"


def _run(options: EncodeOptions, world: World) -> int:
    return EncodeProcess(options, world).serve()


def parse(argv: list[str] | None) -> EncodeOptions:
    """The options of the command line; raises EngineError."""
    parser = argparse.ArgumentParser(prog="kvproto-encode", description="Reference encoder engine of kvproto.")
    add = parser.add_argument
    add("--dir", type=Path, required=True, help="private directory that the engines and the router use")
    add("--tp", type=int, default=1, help="tensor-parallel ranks (default 1)")
    add("--target", default="mla", metavar="DIR", help="the target, whose hidden size is that of a row (default mla)")
    add("--dtype", default="float32", help="element type of the target (default float32)")
    add("--seed", type=int, default=0, help="from which its weights are drawn; prefill expects 0 (default 0)")
    add("--pages", type=int, default=64, help="pages of rows (default 64)")
    add("--transport", default="shm", metavar="NAME", help=TRANSPORT_HELP)
    add("--no-verify", action="store_true", help="do not offer feature VERIFY")
    options = EncodeOptions(**vars(parser.parse_args(argv)))
    for name in ("tp", "pages"):
        if getattr(options, name) < 1:
            raise EngineError(f"--{name} must be at least 1, not {getattr(options, name)}")
    return attrs.evolve(options, dir=private_folder(options.dir))


def main(argv: list[str] | None = None) -> int:
    """Entry point."""
    try:
        options = parse(argv)
        return launch(_run, options, options.tp, options.dir)
    except (EngineError, KvprotoError, DeviceFault) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
