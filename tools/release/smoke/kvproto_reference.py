"""The reference engines: a small model, handed over between two processes, every token compared."""

import json
import subprocess
import sys
from importlib.metadata import entry_points

import kvproto_reference


def main() -> None:
    """Run the demo at its smallest."""
    assert kvproto_reference.__file__.startswith(sys.prefix)
    scripts = {script.name for script in entry_points(group="console_scripts")}
    assert {"kvproto-prefill", "kvproto-decode", "kvproto-encode", "kvproto-router"} <= scripts
    command = [sys.executable, "-m", "kvproto_reference.demo", "--prefill-tp", "1", "--max-new", "2", "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    assert json.loads(done.stdout)["identical"]


if __name__ == "__main__":
    main()
