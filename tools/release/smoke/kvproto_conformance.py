"""The suite beside the core: it has its data, and runs testees that it brings with it."""

import sys
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from kvproto_conformance.__main__ import main as command
from kvproto_conformance.data import TEMPLATES


def suite(*words: str) -> None:
    """Run a command of the suite, which has to end with status 0."""
    said = StringIO()
    with redirect_stdout(said):
        status = command(list(words))
    assert status == 0, said.getvalue()


def main() -> None:
    """Run the testee to start from, and without --quick a whole claim on kvproto itself."""
    with tempfile.TemporaryDirectory() as folder:
        suite("init-testee", folder)
        for language in () if "--quick" in sys.argv else ("node", "c", "rust"):
            (Path(folder) / language).mkdir()
            suite("init-testee", "--lang", language, f"{folder}/{language}")
        suite("run", "--only", "DoneAck/least", "--allow-incomplete", "--", sys.executable, f"{folder}/testee.py")
        suite("copy", f"{folder}/copy")
        assert (Path(folder) / "copy/registry.json").exists()
    assert (Path(sys.executable).parent / "kvproto-conformance").exists()
    assert (TEMPLATES.parent / "action/action.sh").exists()
    if "--quick" not in sys.argv:
        suite("run", "--role", "reader", "--level", "L1", "--", sys.executable, str(TEMPLATES / "python_kvproto.py"))


if __name__ == "__main__":
    main()
