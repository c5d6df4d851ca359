"""docs/sglang.md as a user follows it: two servers, SGLang's load balancer, curl. `ENGINE/python -m tools.engines.sglang_serve MODELS`.

The commands are those of the page. Only the model, the folder, the ports and what makes a server small are put in.
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
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.engines.serving import ANSWERS, free_port, wait
from tools.engines.sglang_engine import MOST, Alone, prompts, told
from tools.engines.vllm_models import make

_DOCS = Path(__file__).parents[2] / "docs"
_SMALL = "--dtype float32 --max-total-tokens 4096 --mem-fraction-static 0.5 --log-level warning --random-seed 0"


def main(argv: list[str]) -> int:
    """Print what differs; the exit status."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = list(_differences(make(Path(argv[0]), "llama"), Path(folder)))
    took = f"{time.monotonic() - began:.0f} s"
    return int(told(f"docs/sglang.md: two servers, SGLang's load balancer, curl: {took}", found))


def _differences(model: Path, folder: Path) -> Iterator[str]:
    folder.chmod(0o700)
    page = (_DOCS / "sglang.md").read_text()
    blocks = re.findall(r"^```\w*\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    servers = [block for block in blocks if block.startswith("KVPROTO_SGLANG=")]
    (both,) = (block for block in blocks if "sglang_router" in block)
    router, curl = both.split("\n\n")
    (flags,) = re.findall(r"^CPU=\"(.*?)\"$", page, re.MULTILINE)
    known = {"/run/kv": str(folder), "MODEL": f"{model} {_SMALL}", "$CPU": flags, "python ": f"{sys.executable} "}
    known |= {port: str(free_port()) for port in ("30000", "30100", "30200", "8998")}

    def filled(command: str) -> str:
        for there, here in known.items():
            command = command.replace(there, here)
        return command

    def started(command: str) -> subprocess.Popen[bytes]:
        return subprocess.Popen(["bash", "-c", filled(command)], cwd=folder, start_new_session=True)

    running = []
    try:
        for command, name in zip(servers, ("prefill", "decode"), strict=True):
            running.append(started(command.replace("{", f'{{"description": "/run/kv/{name}.json", ', 1)))
        for port in ("30100", "30200"):
            wait(known[port], running)
        check = re.findall(r"`(kvproto check .*?)`", (_DOCS / "sglang-reference.md").read_text())[0].replace(
            "kvproto", f"{Path(sys.executable).parent}/kvproto", 1
        )
        fit = subprocess.run(["bash", "-ec", filled(check)], capture_output=True, text=True)
        if fit.returncode:
            yield f"kvproto check: {fit.stdout}{fit.stderr}"
        running.append(started(router))
        wait(known["30000"], running)
        alone = Alone(model)
        for prompt in prompts(2, 40, 200):
            if (found := _ids(known["30000"], prompt)) != (wanted := alone.run(prompt)[0]):
                yield f"prompt of {len(prompt)}: {found}, not {wanted}"
        answer = subprocess.run(["bash", "-ec", filled(curl)], cwd=folder, capture_output=True, text=True)
        if not json.loads(answer.stdout).get("text"):
            yield f"by curl {answer.stdout}{answer.stderr}"
    finally:
        for process in running:
            os.killpg(process.pid, signal.SIGKILL)


def _ids(port: str, prompt: list[int]) -> Any:
    sampling = {"temperature": 0, "max_new_tokens": MOST, "ignore_eos": True}
    body = json.dumps({"input_ids": prompt, "sampling_params": sampling}).encode()
    request = urllib.request.Request(f"http://localhost:{port}/generate", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=ANSWERS) as answer:
        return json.load(answer)["output_ids"]


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
