"""The core alone, with its own dependencies: the codec, a plan, a hand-over through shared memory, the command line."""

import importlib.util
import subprocess
import sys
import tempfile
from pathlib import Path

import kvproto
from kvproto import Cache, Parallel, Pool, Prompt, Sink, Source, lay_out, new_ticket, plan, wire
from kvproto.transport import names
from kvproto.wire.messages import Goodbye


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
    """Pages arrive in another pool, through the public API over ipc."""
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


def commanded() -> None:
    """The command line explains an error, and says what brings a command that is not here."""
    command = Path(sys.executable).parent / "kvproto"
    done = subprocess.run([command, "errors", "BUSY"], capture_output=True, text=True, check=True)
    assert "troubleshooting.md#BUSY" in done.stdout
    done = subprocess.run([command, "describe"], capture_output=True, text=True)
    assert f"pip install kvproto-engines=={kvproto.__version__}" in done.stderr, done.stderr


def main() -> None:
    """Run all checks in turn; the first assertion that fails ends the run."""
    assert Path(kvproto.__file__).is_relative_to(sys.prefix), kvproto.__file__
    for other in ("torch", "kvproto_conformance", "kvproto_reference", "kvproto_vllm", "kvproto_catalog"):
        assert not importlib.util.find_spec(other), other
    assert {"shm", "cuda", "inline", "nixl"} <= set(names()), names()
    codec()
    planned()
    handed_over()
    commanded()


if __name__ == "__main__":
    main()
