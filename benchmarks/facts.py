"""The context of a GPU result: date, machine, versions."""

from __future__ import annotations

import platform
import subprocess
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

PACKAGES = (
    "torch",
    "cuda-core",
    "cuda-bindings",
    "numpy",
    "pyzmq",
    "jax",
    "nixl",
    "mooncake-transfer-engine-cuda13",
    "flashinfer-python",
    "nvidia-nccl-cu13",
)


def facts() -> dict[str, Any]:
    """For the head of a results file."""
    asked = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"), "machine": torch.cuda.get_device_name(0), "gpus": torch.cuda.device_count(),
        "driver": subprocess.run(asked, capture_output=True, text=True, check=True).stdout.split("\n")[0],
        "python": platform.python_version(), "versions": {name: _version(name) for name in PACKAGES},
    }  # fmt: skip


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
