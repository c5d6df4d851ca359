"""docs/vllm.md and vllm-reference.md as a user follows them: two servers, curl, a proxy, vLLM's own router. `ENGINE/python -m tools.engines.vllm_serve MODELS [NAME]`.

The commands are those of the pages. Only the model, the folder, the ports and what makes a server small are put in. With
the NAME of a model (tools/engines/vllm_models.py) each server has two data-parallel replicas of it, as the reference says.
"""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.engines.serving import ANSWERS, ENDS, free_port, wait
from tools.engines.vllm_models import make

_ROOT = Path(__file__).parents[2]
_ROUTER = Path(sys.prefix).parent / "router"
"""The folder of vLLM's router, in which install.sh puts it."""
_PAGES = [_ROOT / "docs/vllm.md", _ROOT / "docs/vllm-reference.md"]
_REPLICAS = {
    "--port": "--data-parallel-size 2 --port", "prefill-{rank}": "prefill-{replica}-{rank}",
    '{"prefill": "ipc:///run/kv/prefill-0"}':
        '{"prefill": "ipc:///run/kv/prefill-0-0", "prefill/1": "ipc:///run/kv/prefill-1-0"}',
}  # fmt: skip
"""By text of a command: its replacement for two replicas."""
_SMALL = "--dtype float32 --enforce-eager --max-model-len 512 --kv-cache-memory-bytes 8388608 --block-size"


def main(argv: list[str]) -> int:
    """Print what differs; the exit status."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = list(_differences(make(Path(argv[0]), (*argv, "llama")[1]), Path(folder), replicas=len(argv) > 1))
    head = "DIFFERS" if found else "same   "
    print(
        f"{head} {time.monotonic() - began:5.0f} s  docs/vllm.md: two servers, curl, a proxy, and vLLM's router",
        flush=True,
    )
    for line in found:
        print(f"        {line}", flush=True)
    return 1 if found else 0


def _differences(model: Path, folder: Path, replicas: bool) -> Iterator[str]:
    folder.chmod(0o700)
    blocks = [
        block for page in _PAGES for block in re.findall(r"^```\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    ]
    commands = [block for block in blocks if block.startswith("vllm serve")]
    firsts = ("curl", "TICKET=", "kvproto check", "curl -s localhost:8200/metrics")
    curl, both, check, count = (next(b for b in blocks if b.startswith(word)) for word in firsts)
    ports = {"8100": free_port(), "8200": free_port()}
    _install_command(folder)
    env = os.environ | {
        "PATH": f"{folder}:{Path(sys.executable).parent}:{os.environ['PATH']}", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": "1", "VLLM_LOGGING_LEVEL": "ERROR",
        "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{folder}",
    }  # fmt: skip

    here = (_REPLICAS if replicas else {}) | {"/run/kv": str(folder), "MODEL": str(model)}

    def filled(command: str) -> str:
        for page, ours in (here | {k: str(v) for k, v in ports.items()}).items():
            command = command.replace(page, ours)
        return command

    running = []
    try:
        mla = model.name == "mla"  # its back end on the CPU has blocks of 16, and needs this
        more = """ --compilation-config '{"custom_ops": ["-rotary_embedding"]}'""" if mla else ""
        for command, block in zip(commands, ("16", "16") if mla else ("64", "32"), strict=True):
            small = re.sub(r'"name": "(\w+)"', rf'\g<0>, "description": "{folder}/\1.json"', filled(command))
            small = small.replace(" --port", f" {_SMALL} {block}{more} --port", 1)
            server = ["bash", "-c", f"exec {small}"]
            running.append(subprocess.Popen(server, env=env, cwd=folder, stdout=sys.stderr, start_new_session=True))
        for port in ports.values():
            wait(port, running)
        prompt, decode = re.findall(r'"prompt": "(.*?)"', curl)[0], f"http://localhost:{ports['8200']}"
        alone = _text(decode, model, prompt)
        for typed in (curl, *(() if replicas else (both,))):  # a ticket of that command is of replica 0
            answer = subprocess.run(["bash", "-ec", filled(typed)], env=env, cwd=folder, capture_output=True, text=True)
            if (by_hand := json.loads(answer.stdout)["choices"][0]["text"]) != alone:
                yield f"by curl {by_hand!r}, not {alone!r}"
        counted = subprocess.run(["bash", "-ec", filled(count)], env=env, cwd=folder, capture_output=True, text=True)
        if not sum(float(line.split()[-1]) for line in counted.stdout.splitlines()):
            yield f"no tokens have come from another engine: {counted.stdout}{counted.stderr}"
        for number, wanted, status in (("8100", "do_remote_prefill", 500), ("8200", "do_remote_decode", 200)):
            if (found := _status(f"http://localhost:{ports[number]}", model, {wanted: True})) != status:
                yield f"the server of {number}, asked for the part of the other, answers {found}, not {status}"
        fit = subprocess.run(["bash", "-ec", filled(check)], env=env, cwd=folder, capture_output=True, text=True)
        if fit.returncode:
            yield f"kvproto check: {fit.stdout}{fit.stderr}"
        port = free_port()
        proxy = [sys.executable, "-m", "tools.engines.proxy", str(port), f"http://localhost:{ports['8100']}", decode]
        running.append(subprocess.Popen(proxy, env=env, cwd=_ROOT))
        wait(port, running, "")
        routed = free_port()
        own = env | {"PYTHONPATH": str(_ROUTER)}
        running.append(subprocess.Popen(_router(routed, ports), env=own, cwd=folder, stdout=sys.stderr))
        wait(routed, running)
        yield from _through({"a proxy": port, "vLLM's router": routed}, decode, model, prompt, replicas)
    finally:
        for process in running:
            process.send_signal(signal.SIGINT)
        for process in running:
            try:
                process.wait(ENDS)
            except subprocess.TimeoutExpired:
                yield f"{process.args!r} does not end"
                process.kill()


def _through(fronts: dict[str, int], decode: str, model: Path, prompt: str, replicas: bool) -> Iterator[str]:
    """Differences between what comes through these, by name and port, and what the decode engine says alone."""
    long = "It was a bright cold day in April, and the clocks were striking thirteen. " * 4
    for text in (prompt, long, *(long[n:] for n in range(8 * replicas))):
        for name, at in fronts.items():
            before = _fetched(decode)
            if (through := _text(f"http://localhost:{at}", model, text)) != (alone := _text(decode, model, text)):
                yield f"through {name} {through!r}, not {alone!r}"
            if name == "vLLM's router" and text == long and _fetched(decode) == before and not replicas:
                yield f"through {name} no page has come from the other engine"


def _router(port: int, ports: dict[str, int]) -> list[str]:
    """The command of vLLM's own router, which knows this connector by what NIXL's answers have too."""
    places = [f"http://127.0.0.1:{at}" for at in ports.values()]
    given = ["--vllm-pd-disaggregation", "--prefill", places[0], "--decode", places[1], "--kv-connector", "nixl"]
    listens = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return [sys.executable, "-m", "vllm_router.launch_router", *given, *listens]


def _fetched(server: str) -> float:
    """Tokens that an engine has from another so far."""
    with urllib.request.urlopen(f"{server}/metrics", timeout=ANSWERS) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.search(r"source_total.*external_kv", line))


def _text(server: str, model: Path, prompt: str) -> str:
    body = {"model": str(model), "prompt": prompt, "max_tokens": 50, "temperature": 0}
    with urllib.request.urlopen(_request(server, body), timeout=ANSWERS) as answer:
        found: Any = json.load(answer)
    return str(found["choices"][0]["text"])


def _status(server: str, model: Path, params: dict[str, Any]) -> int:
    """The HTTP status of its answer to a prompt with these parameters, some of which lack a ticket."""
    body = {"model": str(model), "prompt": "The sea", "max_tokens": 1, "kv_transfer_params": params}
    try:
        with urllib.request.urlopen(_request(server, body), timeout=ANSWERS) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code


def _request(server: str, body: dict[str, Any]) -> urllib.request.Request:
    return urllib.request.Request(
        f"{server}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )


def _install_command(folder: Path) -> None:
    """The command `vllm`, which asks for a package of that name: builds for the CPU have another."""
    import vllm

    version = vllm.__version__.partition("+")[0] + "+cpu"  # by this it knows its platform
    made = folder / f"vllm-{version}.dist-info"
    made.mkdir()
    made.joinpath("METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    command = folder / "vllm"
    guarded = 'if __name__ == "__main__":\n    main()\n'  # its engine is a process that imports this again
    command.write_text(f"#!{sys.executable}\nfrom vllm.entrypoints.cli.main import main\n\n{guarded}")
    command.chmod(0o700)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
