"""The suite beside the core: it has its data, and runs testees that it brings with it."""

import subprocess
import sys
import tempfile
from pathlib import Path


def suite(*words: str) -> str:
    """Run the command and return its output, if it ends with status 0."""
    command = [str(Path(sys.executable).parent / "kvproto-conformance"), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert done.returncode == 0, done.stdout
    return done.stdout


def main() -> None:
    """Run the testee to start from, and without --quick a whole claim on kvproto itself."""
    with tempfile.TemporaryDirectory() as folder:
        suite("init-testee", folder)
        for language in ("node", "c", "rust"):
            (Path(folder) / language).mkdir()
            suite("init-testee", "--lang", language, f"{folder}/{language}")
        suite("run", "--only", "DoneAck/least", "--allow-incomplete", "--", sys.executable, f"{folder}/testee.py")
        suite("copy", f"{folder}/copy")
        assert (Path(folder) / "copy/registry.json").exists()
    from kvproto_conformance.data import TEMPLATES

    assert (TEMPLATES.parent / "action/action.sh").exists()
    if "--quick" not in sys.argv:
        suite("run", "--role", "reader", "--level", "L1", "--", sys.executable, str(TEMPLATES / "python_kvproto.py"))


if __name__ == "__main__":
    main()
