"""`make demo-real`: the demo with a pretrained model, and the same with one bit of a page flipped on its way."""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

FAULTY = Path(__file__).with_name("faulty")
SAID = "What is the capital of France?"


def demo(*args: str) -> subprocess.CompletedProcess[str]:
    """Run it beside transports that damage what they copy."""
    paths = os.pathsep.join([str(FAULTY), os.environ.get("PYTHONPATH", "")])
    command = [sys.executable, "-m", "kvproto_reference.demo", "--real", *args]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": paths})


def flipped(*args: str) -> tuple[int, dict[str, Any]]:
    """One chat, of whose target's cache a bit flips: the exit status, and what the demo says of it."""
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(SAID)
        file.flush()
        done = demo("--transport", "flips-target", "--prompt-file", file.name, "--max-new", "8", "--json", *args)
    return done.returncode, json.loads(done.stdout)


def main() -> int:
    """Run all three; the exit status is 1 where one does not end as it should."""
    begun, wrong = time.monotonic(), 0
    done = demo()
    print(done.stdout)
    wrong += done.returncode != 0 or "The capital of France is Paris." not in done.stdout
    status, told = flipped()
    found = status == 1 and "VERIFY_FAILED at checksums[target]" in (told["requests"][0]["error"] or "")
    print(f"one bit of a page flips: {'found by its checksum' if found else f'NOT FOUND: {told}'}")
    status, told = flipped("--no-verify")
    (request,) = told["requests"]
    differs = status == 1 and request["error"] is None and request["tokens"] != request["undivided_tokens"]
    print(f"the same without checksums: {'other tokens' if differs else 'THE SAME TOKENS'}: {request['text']!r}")
    wrong += (not found) + (not differs)
    print(f"{3 - wrong} of 3 ended as they should, {time.monotonic() - begun:.0f} s")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
