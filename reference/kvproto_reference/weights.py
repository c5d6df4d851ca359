"""Named tensors of the safetensors files of a folder, read slice by slice."""

import hashlib
import json
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from .errors import EngineError

WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
SCALES = ".scales"
SAMPLES, SAMPLE = 64, 4096
"""Blocks of a file, and bytes of each, that `identity` reads."""


class Weights:
    """All tensors of model.safetensors or the shards that model.safetensors.index.json names, or of another file."""

    def __init__(self, folder: Path, name: str = WEIGHTS_FILE) -> None:
        placed = _placed(folder) if name == WEIGHTS_FILE else {}
        self.files = weight_files(folder) if name == WEIGHTS_FILE else [folder / name]
        self._handles = {path: _open(path) for path in self.files}
        self._file_of: dict[str, Path] = {}
        for path, handle in self._handles.items():
            names: list[str] = handle.keys()  # type: ignore[no-untyped-call]
            self._file_of |= {name: path for name in names if placed.get(name, path.name) == path.name}

    @property
    def names(self) -> set[str]:
        """Names of all tensors."""
        return set(self._file_of)

    def read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None = None) -> Tensor:
        """One slice, dim by dim, of the tensor `name`, which must have `shape`; all of it without `part`.

        A tensor of 8 bits per element, as `in_bytes` makes it, is float32. Raises EngineError for a tensor that is
        missing or of another shape or type.
        """
        path, piece = self._read(name, shape, part)
        if piece.dtype == torch.int8:
            if (scales := name + SCALES) not in self._file_of:
                raise EngineError(
                    f"checkpoint weights {path}: {name} is {piece.dtype}, and there is no tensor {scales}"
                )
            rows = (*shape[:-1], 1)
            return piece * self._read(scales, rows, None if part is None else (*part[:-1], slice(1)))[1]
        if not piece.is_floating_point() or piece.element_size() < 2:
            raise EngineError(f"checkpoint weights {path}: {name} is {piece.dtype}, which is not supported")
        return piece

    def read_whole(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """The tensor `name` of whole numbers, as int64; raises EngineError as `read` does."""
        path, piece = self._read(name, shape, None)
        if piece.dtype not in (torch.int32, torch.int64):
            raise EngineError(f"checkpoint weights {path}: {name} is {piece.dtype}, not of whole numbers")
        return piece.long()

    def _read(self, name: str, shape: tuple[int, ...], part: tuple[slice, ...] | None) -> tuple[Path, Tensor]:
        path = self._file_of.get(name)
        if path is None:
            raise EngineError(f"checkpoint weights {self.files[0].parent} do not fit config.json: no tensor {name}")
        found = self._handles[path].get_slice(name)  # type: ignore[no-untyped-call]
        if tuple(found.get_shape()) != shape:
            has = list(found.get_shape())
            raise EngineError(f"checkpoint weights {path} do not fit config.json: {name} is {has}, not {list(shape)}")
        return path, found[part or ...]


def in_bytes(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """A tensor [..., rows, elements] of 8 bits per element, and a float32 scale of each row."""
    scales = tensor.float().abs().amax(-1, keepdim=True).clamp(min=1e-12) / 127
    return {name: (tensor / scales).round().to(torch.int8), name + SCALES: scales}


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint folder, by name; raises EngineError if one is missing."""
    names = sorted(set(_placed(folder).values()) or {WEIGHTS_FILE})
    for name in names:
        if not (folder / name).is_file():
            raise EngineError(f"checkpoint folder {folder} has no {name}")
    return [folder / name for name in names]


def identity(folder: Path, config: bytes) -> str:
    """A name for a checkpoint by its config, and by header, size and blocks spread over the data of each weight file.

    Blocks are included because models that were tuned from one another have equal headers.
    """
    digest = hashlib.sha256(config)
    for path in weight_files(folder):
        size = path.stat().st_size
        with path.open("rb") as file:
            header = int.from_bytes(file.read(8), "little")
            digest.update(size.to_bytes(8, "little") + file.read(min(header, size)))
            for block in range(SAMPLES):
                file.seek(8 + header + (size - 8 - header) * block // SAMPLES)
                digest.update(file.read(SAMPLE))
    return digest.hexdigest()[:16]


def _placed(folder: Path) -> dict[str, str]:
    """The shard of each tensor, by name; empty if there is no index."""
    index = folder / INDEX_FILE
    if not index.is_file():
        return {}
    try:
        return dict(json.loads(index.read_text())["weight_map"])
    except (ValueError, KeyError, TypeError) as error:
        raise EngineError(f"checkpoint index {index} cannot be read: {error!r}") from error


def _open(path: Path) -> safe_open:
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise EngineError(f"checkpoint weights {path} cannot be read: {error}") from error
