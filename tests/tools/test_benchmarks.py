"""Scripts in benchmarks/ import what is there, also those that only run on GPUs or beside engines that are not installed.

Those that need neither also run, in test_small_runs.py; LEFT_OUT says why others do not.
"""

import ast
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = [ROOT / name for name in ("", "reference", "conformance", "integrations", "benchmarks")]
OURS = {"kvproto", "tests", "tools", *(path.name for folder in FOLDERS[1:4] for path in folder.iterdir())}
SCRIPTS = sorted((ROOT / "benchmarks").glob("*.py"))
RUNS = [
    "acceptance --quick",
    "codec --rounds 1",
    "convert_host --rounds 1 --tokens 64",
    "dcp_gpu --device cpu --gpus 1",
    "dcp_serving_gpu --device cpu --gpus 2",
    "floods --quick",
    "frameworks --quick --rounds 1",
    "harness {results}/plan.json {results}/plan.json",
    "inline --quick --rounds 1",
    "intent --quick --rounds 1",
    "latency_host --rounds 1 --pushes 2",
    "library --rounds 1",
    "one_peer --quick",
    "plan --rounds 1",
    "seeing --rounds 1",
    "serving --quick --rounds 1",
    "serving_drafts --quick --rounds 1",
    "session --quick floods frames held",
    "session --quick latency many messages transfers sessions",
    "spread",
    "tables --check",
    "tiers --quick --rounds 1",
    "tiers_sealed --quick",
    "tiers_stores --quick",
    "transfer_host --rounds 1 --runs 16777216",
    "trips --quick",
    "worst_cases --rounds 1",
]
"""Each as small as its arguments allow. Without part `recovery` of `session`: it waits 10 s until a source that is stopped is suspect."""
NEEDS = {
    "codec": "msgspec",
    "dcp_gpu": "torch",
    "dcp_serving_gpu": "torch",
    "frameworks": "jax",
    "serving": "transformers",
    "serving_drafts": "torch",
    "tiers_sealed": "cryptography",
    "tiers_stores": "rocksdict",
    "transfer_host": "nixl",
}
"""Packages without which a script is skipped here."""
GPUS, VLLM = "needs GPUs", "needs vLLM, which takes a minute to start"
LEFT_OUT = {
    "convert_gpu": GPUS,
    "crate": "compiles the crate with optimization, which takes a minute",
    "decode_engine": GPUS,
    "nixl_packed": GPUS,
    "overlap": GPUS,
    "peers": GPUS,
    "plots": "writes the pictures of the pages, wherever it runs",
    "sglang_dcp_gpu": GPUS,
    "tests_gpu": GPUS,
    "tiers_engines": "needs SGLang, which takes half a minute to start",
    "tiers_engines_gpu": GPUS,
    "tiers_gpu": GPUS,
    "transfer_gpu": GPUS,
    "transfer_many": GPUS,
    "transfer_shapes": GPUS,
    "verify_gpu": GPUS,
    "vllm_convert_gpu": VLLM,
    "vllm_cpu": VLLM,
    "vllm_gpu": VLLM,
    "vllm_handover": VLLM,
    "vllm_ranks_gpu": VLLM,
}


@cache
def file_of(module: str) -> Path | None:
    """The file of a module of this repository, by its dotted name; a folder if that has no __init__.py."""
    for folder in FOLDERS:
        path = folder / module.replace(".", "/")
        for candidate in (path.with_suffix(".py"), path / "__init__.py", path):
            if candidate.exists():
                return candidate
    return None


@cache
def names_in(path: Path) -> set[str]:
    """Names that a module defines, imports or loads by name."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())) if path.is_file() else ():
        match node:
            case ast.FunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name for alias in node.names}
            case ast.Name(ctx=ast.Store()):
                names.add(node.id)
            case ast.Constant(value=str()):
                names.add(node.value)
    return names


@pytest.mark.parametrize("script", SCRIPTS, ids=[script.stem for script in SCRIPTS])
def test_imports_are_there(script: Path) -> None:
    missing = []
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module:
            home = file_of(node.module)
            if home is None and node.module.partition(".")[0] in OURS:
                missing.append(node.module)
            elif home is not None:
                known = names_in(home)
                lacking = [a.name for a in node.names if a.name not in known and not file_of(f"{node.module}.{a.name}")]
                missing += [f"{node.module}.{name}" for name in lacking]
    assert not missing


def test_a_script_runs_here_or_it_is_said_why_not() -> None:
    """Modules that are not programs have no main."""
    programs = {script.stem for script in SCRIPTS if "__main__" in script.read_text()}
    assert programs == {command.split()[0] for command in RUNS} | set(LEFT_OUT)
