"""Distributions in empty environments, installed from a release's own index, and used as their users do."""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from tools.release.checking import INDEX

SMOKE = Path(__file__).parent / "smoke"
_PYTHONS = ("3.11", "3.12", "3.13", "3.13t", "3.14", "3.14t")


class Failed(Exception):
    """A step of a release that did not do what it should."""


def pythons() -> Iterator[str]:
    """The commands of all Pythons of this machine that kvproto supports, the running one first."""
    yield sys.executable
    own = f"{sys.version_info.major}.{sys.version_info.minor}"
    kept = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for release in _PYTHONS:
        for command in (f"python{release}", *map(str, kept.glob(f"{release}*/bin/python{release}"))):
            if release != own and _runs(command):
                yield command
                break


def smoke(venv: Path, distribution: str, *words: str) -> None:
    """Run the program of a distribution that is installed in an environment."""
    ran([str(venv / "bin/python"), "-I", str(SMOKE / f"{distribution.replace('-', '_')}.py"), *words], venv)


def type_check(venv: Path) -> None:
    """Check a user's program against the installed core by mypy --strict, which needs py.typed."""
    mypy = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={venv}/cache"]
    program = shutil.copy(SMOKE / "typed.py", venv)  # beside the checkout, its packages would be found first
    ran([*mypy, "--python-executable", str(venv / "bin/python"), str(program)], venv)


@contextmanager
def environment(python: str) -> Iterator[Path]:
    """The folder of an empty virtual environment, for the length of a `with`."""
    with TemporaryDirectory(prefix="kvproto-release-") as folder:
        ran([python, "-m", "venv", "--without-pip", f"{folder}/venv"], Path(folder))
        yield Path(folder) / "venv"


def install(venv: Path, release: Path, *words: str) -> None:
    """`pip install` into an environment, which has no pip of its own; what is in the release comes from there."""
    pip = [sys.executable, "-m", "pip", "--python", str(venv / "bin/python"), "install", "-q", "--no-compile"]
    ran([*pip, "--disable-pip-version-check", "--find-links", str(release / INDEX), *words], venv)


def ran(command: list[str], folder: Path) -> str:
    """Run a command in a folder without the checkout on its path, and return its output; raises Failed if it fails."""
    path = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}
    done = subprocess.run(command, cwd=folder, env=path, capture_output=True, text=True)
    if done.returncode:
        raise Failed(f"{' '.join(command)}\n{done.stdout}{done.stderr}")
    return done.stdout


def _runs(command: str) -> bool:
    try:
        return not subprocess.run([command, "-c", "import ensurepip, venv"], capture_output=True).returncode
    except FileNotFoundError:
        return False
