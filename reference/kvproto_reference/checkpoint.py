"""Checkpoint folders: config.json and model.safetensors."""

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from safetensors.torch import save as to_bytes

from .errors import EngineError
from .models import SOLO, Decoder, ModelConfig, TensorParallel, shard

CHECKPOINTS = Path(__file__).parent / "checkpoints"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"


def save(folder: Path, model: Decoder) -> None:
    """Write a full (TP 1) model to a folder, which is made if missing."""
    if model.tp.size != 1:
        raise EngineError("only a full (TP 1) model can be saved")
    folder.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG_FILE).write_text(model.config.to_json())
    weights = {name: value.detach().contiguous() for name, value in model.state_dict().items()}
    # Not save_file: it makes files that only the owner may read, which an installed package cannot use.
    (folder / WEIGHTS_FILE).write_bytes(to_bytes(weights))


def load_config(folder: Path) -> ModelConfig:
    """Sizes of the model in a checkpoint folder."""
    return ModelConfig.from_json(_require(folder, CONFIG_FILE).read_text())


def load(folder: Path, tp: TensorParallel = SOLO) -> Decoder:
    """This TP rank's part of the model in a checkpoint folder, float32, ready for inference."""
    config = load_config(folder)
    path = _require(folder, WEIGHTS_FILE)
    try:
        state = load_file(path)
    except SafetensorError as error:
        raise EngineError(f"checkpoint weights {path} cannot be read: {error}") from error
    model = Decoder(config, tp)
    try:
        model.load_state_dict(shard(config, tp, state))
    except RuntimeError as error:
        raise EngineError(f"checkpoint weights {path} do not fit {CONFIG_FILE}: {error}") from error
    return model.eval().requires_grad_(False)


def _require(folder: Path, name: str) -> Path:
    if not folder.is_dir():
        raise EngineError(f"checkpoint folder {folder} does not exist")
    path = folder / name
    if not path.is_file():
        raise EngineError(f"checkpoint folder {folder} has no {name}")
    return path
