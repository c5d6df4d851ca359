"""Uses the built wheel as a stranger would: in an empty environment with nothing but its own dependencies.

    python -m tools.wheel_test dist/kvproto-*.whl

Installs the wheel there, runs tools/wheel/smoke.py outside of the repository, and type-checks tools/wheel/typed.py
against the installed package, which fails if py.typed is missing. The exit status is 0 only if everything passed.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

HERE = Path(__file__).parent / "wheel"


def main(wheel: str) -> int:
    """Runs the three steps and stops at the first that fails."""
    with tempfile.TemporaryDirectory(prefix="kvproto-wheel-") as folder:
        venv = Path(folder) / "venv"
        python = str(venv / "bin/python")
        pip = [sys.executable, "-m", "pip", "--python", python]
        mypy = [sys.executable, "-m", "mypy", "--strict", f"--cache-dir={folder}/cache", "--python-executable", python]
        for name in ("smoke.py", "typed.py"):
            (Path(folder) / name).write_text((HERE / name).read_text())
        steps = (
            [sys.executable, "-m", "venv", "--without-pip", str(venv)],
            [*pip, "install", "-q", "--disable-pip-version-check", "--no-compile", str(Path(wheel).resolve())],
            [python, "-I", "smoke.py"],
            [*mypy, "--config-file=", "typed.py"],
        )
        for step in steps:
            status = subprocess.run(step, cwd=folder, env=_kept()).returncode
            if status:
                print(f"failed: {' '.join(step)}", file=sys.stderr)
                return status
    return 0


def _kept() -> dict[str, str]:
    """The environment without the variables that would put the repository's own packages on the path."""
    return {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
