"""Distributions as `make release` builds them: what each needs, and how one that was changed is found."""

import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest

import kvproto
from tools.release import building, checking


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    files = building.build(tmp_path_factory.mktemp("dist"), only=("kvproto-engines", "kvproto-vllm"))
    return {path.name.partition("-")[0]: path for path in files if path.suffix == ".whl"}


def test_a_distribution_needs_the_others_at_its_own_version(wheels: dict[str, Path]) -> None:
    pins = {str(need) for need in checking.metadata(wheels["kvproto_vllm"]).requires_dist or ()}
    assert pins == {f"kvproto=={kvproto.__version__}", f"kvproto-engines=={kvproto.__version__}"}


def test_what_is_built_has_no_problem(wheels: dict[str, Path]) -> None:
    assert list(checking.problems([*wheels.values()])) == []


def test_a_file_that_is_in_two_wheels_is_named(wheels: dict[str, Path], tmp_path: Path) -> None:
    again = shutil.copy(wheels["kvproto_vllm"], tmp_path / "again.whl")
    problems = [*checking.problems([wheels["kvproto_vllm"], Path(again)])]
    assert "kvproto_vllm/connector.py is in 2 wheels" in problems


def test_a_file_that_was_changed_in_a_wheel_differs_from_its_record(wheels: dict[str, Path], tmp_path: Path) -> None:
    changed = tmp_path / wheels["kvproto_vllm"].name
    with ZipFile(wheels["kvproto_vllm"]) as whole, ZipFile(changed, "w") as archive:
        for name in whole.namelist():
            archive.writestr(name, whole.read(name) + b"\n" * name.endswith("connector.py"))
    assert checking.altered(changed) == ["kvproto_vllm/connector.py", "kvproto_vllm/tiers/connector.py"]
    assert checking.altered(wheels["kvproto_vllm"]) == []


def test_wheels_of_two_versions_are_refused_by_pip_and_when_they_are_imported(tmp_path: Path) -> None:
    source = building.copied(tmp_path / "source") / "kvproto/__init__.py"
    source.write_text(source.read_text().replace(f'"{kvproto.__version__}"', '"9.8.7"'))
    (_, older) = building.build(tmp_path / "older", only=("kvproto-engines",))
    (*_, core) = building.build(tmp_path / "newer", source.parents[1], only=(source.parents[1].name,))
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-index", f"--target={tmp_path / 'site'}"]
    refused = subprocess.run([*pip, older, core], capture_output=True, text=True)
    assert "conflicting dependencies" in refused.stderr
    subprocess.run([*pip, "--no-deps", older, core], check=True)
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'site')!r}); import kvproto_catalog"
    done = subprocess.run([sys.executable, "-I", "-c", code], capture_output=True, text=True)
    told = f"NO_VERSION at kvproto-engines: expected kvproto {kvproto.__version__}, got 9.8.7"
    assert told in done.stderr.splitlines()[-1]


def test_pip_refuses_a_wheel_of_which_a_byte_is_changed(wheels: dict[str, Path]) -> None:
    assert list(checking.accepted(wheels["kvproto_engines"])) == []
