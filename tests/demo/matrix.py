"""`make demo-matrix`: the demo for prefill TP 1 to 4, decode TP 1 to 3, in all four mixes of target and draft."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time


def main() -> int:
    """Run all 48; a line each; exit status 1 if one fails."""
    failed, start = 0, time.monotonic()
    for prefill, decode, target, draft in itertools.product((1, 2, 3, 4), (1, 2, 3), ("mla", "gqa"), ("mla", "gqa")):
        command = [sys.executable, "-m", "kvproto_reference.demo", "--json", "--max-new", "24"]
        command += ["--prefill-tp", str(prefill), "--decode-tp", str(decode), "--target", target, "--draft", draft]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        verdicts = json.loads(done.stdout)["verdicts"] if done.stdout else {}
        good = done.returncode == 0 and verdicts and all(verdicts.values())
        failed += not good
        note = "agrees" if good else f"FAILED {verdicts} {done.stderr.strip()[-200:]}"
        print(f"prefill TP {prefill}, decode TP {decode}, {target} with {draft} draft: {note}", flush=True)
    print(f"{48 - failed} of 48 in {time.monotonic() - start:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
