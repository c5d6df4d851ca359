"""A folder with a LoRA adapter, whose weights nobody loads."""

from pathlib import Path


def adapter(folder: Path, seed: int = 0) -> Path:
    """Make it; other seeds give other weights."""
    folder.mkdir(exist_ok=True)
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes(bytes([seed]))
    return folder
