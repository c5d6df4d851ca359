"""Checks of what must be true of the files of a release, and that damaged ones are refused."""

import base64
import hashlib
import html
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from zipfile import ZipFile

from packaging.metadata import Metadata

import kvproto
from tools.release.building import ROOT

CORE_BYTES = 640_000
"""The most that the wheel `kvproto` may have: an engine that takes it gets no vectors, models or weights."""
INDEX = "index.html"
"""The page of a release by which pip installs: links with the hash of each file."""
_FAMILY = "kvproto"


def metadata(wheel: Path) -> Metadata:
    """The METADATA of a wheel; raises packaging.metadata.InvalidMetadata, or an ExceptionGroup of them."""
    with ZipFile(wheel) as archive:
        (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        return Metadata.from_email(archive.read(name))


def digest(path: Path) -> str:
    """The SHA-256 of a file, in hex."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def index(files: Iterable[Path]) -> str:
    """The text of INDEX for these files, which lie beside it."""
    links = (f'<a href="{html.escape(path.name)}#sha256={digest(path)}">{path.name}</a><br>' for path in files)
    return "<!doctype html>\n<title>kvproto</title>\n" + "\n".join(links) + "\n"


def problems(files: list[Path]) -> Iterator[str]:
    """All that is wrong with the files of a release, a line each."""
    wheels = [path for path in files if path.suffix == ".whl"]
    owners = Counter(name for path in wheels for name in ZipFile(path).namelist())
    yield from (f"{name} is in {count} wheels" for name, count in owners.items() if count > 1)
    if f"\n## {kvproto.__version__} " not in (ROOT / "CHANGELOG.md").read_text():
        yield f"CHANGELOG.md has no section ## {kvproto.__version__}"
    for path in wheels:
        yield from (f"{path.name}: {problem}" for problem in _of_wheel(path))


def accepted(wheel: Path) -> Iterator[str]:
    """The ways in which pip installs a wheel of which one byte is changed: none, by an index or as a file."""
    with TemporaryDirectory(prefix="kvproto-damaged-") as folder:
        (Path(folder) / INDEX).write_text(index([wheel]))
        damaged = Path(folder) / wheel.name
        data = bytearray(wheel.read_bytes())
        data[len(data) // 2] ^= 1
        damaged.write_bytes(data)
        name, version, *_ = wheel.name.split("-")
        by_index = ["--find-links", f"{folder}/{INDEX}", f"{name}=={version}"]
        ways = (by_index, "DO NOT MATCH THE HASHES"), ([str(damaged)], "Bad CRC-32|while decompressing")
        for source, reason in ways:
            pip = [
                sys.executable,
                "-m",
                "pip",
                "install",
                "-q",
                "--disable-pip-version-check",
                "--target",
                f"{folder}/to",
            ]
            done = subprocess.run([*pip, "--no-deps", "--no-index", *source], capture_output=True, text=True)
            if not done.returncode or not re.search(reason, done.stderr):
                yield f"pip install {' '.join(source)}: {done.stderr or 'installed'}"


def altered(wheel: Path) -> list[str]:
    """The files of a wheel that differ from its RECORD, or are not in it."""
    with ZipFile(wheel) as archive:
        (record,) = (name for name in archive.namelist() if name.endswith(".dist-info/RECORD"))
        known = {
            name: digest for name, digest, _ in (row.rsplit(",", 2) for row in archive.read(record).decode().split())
        }
        return [
            name for name in archive.namelist() if name != record and known.get(name) != _digest(archive.read(name))
        ]


def _of_wheel(path: Path) -> Iterator[str]:
    about = metadata(path)
    yield from (f"{name} differs from RECORD" for name in altered(path))
    if str(about.version) != kvproto.__version__:
        yield f"version {about.version}, and kvproto has {kvproto.__version__}"
    for need in about.requires_dist or ():
        if need.name.startswith(_FAMILY) and str(need.specifier) != f"=={kvproto.__version__}":
            yield f"needs {need}, and not exactly {kvproto.__version__}"
    names = ZipFile(path).namelist()
    if not any(name.endswith("/LICENSE") for name in names):
        yield "has no licence"
    if about.name == _FAMILY:
        if path.stat().st_size > CORE_BYTES:
            yield f"has {path.stat().st_size:,} bytes, more than {CORE_BYTES:,}"
        if "kvproto/py.typed" not in names:
            yield "has no py.typed"


def _digest(data: bytes) -> str:
    return "sha256=" + base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
