"""Scripts in benchmarks/ end well, each run as small as its arguments allow. What they measure is not looked at."""

import os
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.processes import Command, imported
from tests.tools.test_benchmarks import NEEDS, ROOT, RUNS

BENCHMARKS = ROOT / "benchmarks"
imported(__name__, "torch.distributed", "kvproto_reference.demo.__main__")


def script() -> int:
    """What `python benchmarks/...` does in a folder, in a process that has imported torch already."""
    folder, *sys.argv[:] = sys.argv[1:]
    os.chdir(folder)
    sys.path.insert(0, str(BENCHMARKS))
    main = ModuleType("__main__")
    main.__file__ = sys.argv[0]
    sys.modules |= {"__main__": main, "__mp_main__": main}  # by the latter name its processes send its classes
    exec(compile(Path(main.__file__).read_bytes(), main.__file__, "exec"), vars(main))
    return 0


@pytest.mark.parametrize("command", RUNS)
def test_a_small_run_ends_well(command: str, tmp_path: Path) -> None:
    name, *arguments = command.format(results=BENCHMARKS / "results").split()
    if name in NEEDS:
        pytest.importorskip(NEEDS[name])
    status, _, said = Command(script, [tmp_path, BENCHMARKS / f"{name}.py", *arguments]).wait(110)
    assert status == 0, said
