"""Two vLLM that find each other in etcd: `ENGINE/python -m tools.engines.vllm_directory FOLDER`.

Each prefills, decodes, registers itself and looks up the other. One is killed and comes back; etcd goes for good, and the
engines go on with what they know.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

from tools.engines import vllm_cases as cases
from tools.engines.serving import free_port, wait
from tools.engines.vllm_engine import ASK, Engine, new_name, over, prompts
from tools.engines.vllm_models import make
from tools.engines.vllm_pd import told

_FOUND = 60.0
"""Seconds in which an engine has found another."""


def _etcd(folder: Path) -> tuple[subprocess.Popen[bytes], str] | None:
    """A member of its own, and how settings name it; None where there is no etcd."""
    program = shutil.which("etcd", path=f"/usr/bin:{Path(sys.prefix, 'debian/usr/bin')}")
    if program is None:
        return None
    here, peer = (f"http://127.0.0.1:{free_port()}" for _ in range(2))
    given = ["--data-dir", str(folder / "etcd"), "--listen-client-urls", here, "--advertise-client-urls", here]
    given += ["--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"default={peer}"]
    process = subprocess.Popen([program, *given], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    wait(here.rpartition(":")[2], [process])
    return process, f"etcd:{here}"


def _meet(prefill: Engine, decode: Engine) -> Iterator[str]:
    """Prompts are tried until one is fetched; until then `decode` computes them, as it recomputes what it cannot fetch."""
    end, fetched = time.monotonic() + _FOUND, False
    while not fetched and time.monotonic() < end:
        (prompt,), name = prompts(1, 60, 61, int(time.monotonic() * 1000)), new_name()
        decode.run(name, prompt, 4, prefill.run(new_name(), prompt, 1, ASK)[2])
        fetched = name in decode.fetched
    if not fetched:
        yield f"{decode.name} has not found {prefill.name} within {_FOUND:.0f} s: {decode.said()[-600:]}"


def _same(one: Engine, two: Engine) -> Iterator[str]:
    """Both ways, fetched, and the tokens are those of the engine that prefills."""
    for prefill, decode in ((one, two), (two, one)):
        (prompt,), name = prompts(1, 90, 91, int(time.monotonic() * 1000)), new_name()
        alone, found = prefill.run(new_name(), prompt, 16)[0], over(prefill, decode, prompt, 16, name)
        if found[0] != alone or name not in decode.fetched:
            yield f"{prefill.name} to {decode.name}: {found}, not {alone}, or not fetched"


def main(argv: list[str]) -> int:
    """Print each case and whether it went well; the exit status."""
    begun, wrong = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o700)
        if (found := _etcd(Path(folder))) is None:
            print("NOT RUN: two vLLM that find each other in etcd, which is not here: apt-get install etcd-server")
            return 0
        etcd, place = found
        model, about = str(make(Path(argv[0]), "llama")), {"register": place, "sources": place}
        one = Engine.of("one", folder, [], "recompute", extra=about, model=model, block_size=64)
        two = Engine.of("two", folder, [], "recompute", extra=about, model=model)
        engines = [one, two]
        try:
            for engine in engines:
                engine.start()
            for engine in engines:
                engine.ready()
            wrong += told(begun, "etcd: each finds the other", [*_meet(one, two), *_meet(two, one)])
            wrong += told(begun, "etcd: same tokens", list(_same(one, two)))
            one.kill()
            one.start()
            one.ready()
            wrong += told(begun, "etcd: one was killed and is found again", [*_meet(one, two), *_meet(two, one)])
            etcd.kill()
            etcd.wait()
            wrong += told(begun, "etcd: gone, and the engines go on", list(_same(one, two)))
            wrong += told(begun, "etcd: left idle", list(cases.left_idle(one, two)))
        except (RuntimeError, TimeoutError, OSError) as error:
            wrong += told(begun, "etcd", [str(error)])
        finally:
            for engine in engines:
                engine.stop()
            etcd.kill()
    print(f"{wrong} differ, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
