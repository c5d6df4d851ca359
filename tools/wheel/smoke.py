"""A trial of the bare wheel with its own dependencies: the codec, a plan, and a hand-over through shared memory."""

import importlib.util
import sys
import tempfile

import kvproto
from kvproto import Cache, Parallel, Pool, Prompt, Sink, Source, lay_out, new_ticket, plan, wire
from kvproto.transport import names
from kvproto.wire.messages import Goodbye
from kvproto_conformance.__main__ import main as conformance


def codec() -> None:
    """A frame is decoded to the message that was encoded."""
    message = Goodbye(session=7, reason="shutdown")
    assert wire.decode(wire.encode(message)) == message


def planned() -> None:
    """Two engines of different sizes agree on who sends what."""
    cache = [Cache.gqa("kv", 2, kv_heads=4, head_dim=8, page=16)]
    made = plan(lay_out(cache, Parallel(tp=4)), lay_out(cache, Parallel(tp=2)))
    assert made.required(1) == (2, 3), made.required(1)


def handed_over() -> None:
    """Pages arrive in another pool, through the public API."""
    geometry = lay_out([Cache.gqa("kv", 2, kv_heads=2, head_dim=8, page=16)])
    here, there = Pool.allocate(geometry, pages=8), Pool.allocate(geometry, pages=8)
    here.array("kv", layer=0, part="k")[:3] = 7
    with tempfile.TemporaryDirectory() as folder:
        address = f"ipc://{folder}/prefill"
        with Source("prefill", here, address) as source, Sink("decode", there, {"prefill": address}) as sink:
            ticket, prompt = new_ticket("prefill"), Prompt(range(40))
            request = source.request(ticket, prompt)
            fetch = sink.fetch(ticket, prompt, {"kv": [5, 1, 6]})
            request.finish({"kv": [0, 1, 2]})
            fetch.wait(20)
            request.wait(20)
    assert there.array("kv", layer=0, part="k")[[5, 1]].min() == 7


def judged() -> None:
    """The conformance suite has its data, and runs a testee that it wrote itself."""
    with tempfile.TemporaryDirectory() as folder:
        assert conformance(["init-testee", folder]) == 0
        asked = ["--only", "DoneAck/least", "--allow-incomplete"]
        assert conformance(["run", *asked, "--", sys.executable, f"{folder}/testee.py"]) == 0


def main() -> None:
    """Run all checks in turn; the first assertion that fails ends the run."""
    assert not importlib.util.find_spec("torch")
    assert kvproto.__version__
    codec()
    planned()
    handed_over()
    judged()
    assert {"shm", "cuda", "nixl"} <= set(names()), names()
    print("the wheel works in an empty environment")


if __name__ == "__main__":
    main()
