"""Distributions of kvproto that are installed at different versions, by the metadata that pip leaves."""

import subprocess
import sys
from pathlib import Path

import pytest

from kvproto.distributions import check_versions
from kvproto.errors import LocalError
from kvproto.wire.enums import ErrorCode
from tests.errors import raises


def installed(folder: Path, name: str, version: str, *needs: str) -> None:
    """The metadata of a distribution in a folder of sys.path."""
    data = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    data.mkdir(parents=True)
    lines = [f"Name: {name}", f"Version: {version}", *(f"Requires-Dist: {need}" for need in needs)]
    (data / "METADATA").write_text("Metadata-Version: 2.4\n" + "\n".join(lines) + "\n")


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


def test_one_version_is_accepted(site: Path) -> None:
    installed(site, "kvproto", "7.1.0")
    installed(site, "kvproto-vllm", "7.1.0", "kvproto==7.1.0", "torch>=2.10", "other==3 ; extra == 'kvproto'")
    check_versions("kvproto-vllm")


def test_another_version_of_the_core_is_named_with_what_to_install(site: Path) -> None:
    installed(site, "kvproto", "7.2.0")
    installed(site, "kvproto-vllm", "7.1.0", "kvproto-engines==7.1.0", "kvproto==7.1.0")
    installed(site, "kvproto-engines", "7.1.0")
    advice = "pip install kvproto-vllm==7.1.0 kvproto==7.1.0"
    fields = {"path": "kvproto-vllm", "mine": "kvproto 7.1.0", "yours": "7.2.0", "advice": advice}
    with raises(LocalError, code=ErrorCode.NO_VERSION, **fields):
        check_versions("kvproto-vllm")


def test_a_distribution_that_is_missing_is_named(site: Path) -> None:
    installed(site, "kvproto-vllm", "7.1.0", "kvproto-nowhere==7.1.0")
    with raises(LocalError, code=ErrorCode.NO_VERSION, mine="kvproto-nowhere 7.1.0", yours="not installed"):
        check_versions("kvproto-vllm")


@pytest.mark.parametrize(
    ("package", "name"),
    [
        ("kvproto_vllm", "kvproto-vllm"),
        ("kvproto_sglang", "kvproto-sglang"),
        ("kvproto_engines", "kvproto-engines"),
        ("kvproto_catalog", "kvproto-engines"),
        ("kvproto_captures", "kvproto-engines"),
        ("kvproto_reference", "kvproto-reference"),
        ("kvproto_conformance.data", "kvproto-conformance"),
    ],
)
def test_each_package_refuses_another_version_when_it_is_imported(tmp_path: Path, package: str, name: str) -> None:
    installed(tmp_path, "kvproto", "7.2.0")
    installed(tmp_path, name, "7.1.0", "kvproto==7.1.0")
    code = f"import sys; sys.path[:0] = {[str(tmp_path), *sys.path]}; import {package}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode
    assert "7.2.0" in done.stderr.splitlines()[-1]
    assert f"pip install {name}==7.1.0 kvproto==7.1.0" in done.stderr.splitlines()[-1]


@pytest.mark.parametrize(
    ("engine", "code"),
    [("vllm", "from kvproto_vllm import KvprotoConnector"), ("sglang", "import kvproto_sglang as k; k.register()")],
)
def test_an_adapter_without_its_engine_says_so(engine: str, code: str) -> None:
    code = f"import sys; sys.path[:] = {sys.path}; sys.modules[{engine!r}] = None; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert f"kvproto-{engine} runs inside of {engine}, which this environment lacks" in done.stderr.splitlines()[-1]


def test_a_command_imports_no_more_than_it_needs() -> None:
    """`kvproto errors` takes a third of the time that numpy alone does."""
    code = "import sys; from kvproto.cli.main import main; main(['errors', 'BUSY']); print('numpy' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False"


def test_importing_kvproto_imports_neither_numpy_nor_zeromq() -> None:
    code = "import sys, kvproto; sys.exit(bool({'numpy', 'zmq', 'msgpack'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
