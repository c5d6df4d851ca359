"""The commands that know engines of others: `describe`, and `import` of a capture."""

import json
import tempfile
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

from kvproto.cli.main import main as command

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "hidden_size": 64,
    "vocab_size": 256,
    "torch_dtype": "bfloat16",
}


def main() -> None:
    """Describe a model, and hold what comes out against itself, by options of `import` too."""
    with tempfile.TemporaryDirectory() as folder:
        config, described = Path(folder) / "config.json", Path(folder) / "described.json"
        config.write_text(json.dumps(CONFIG))
        with described.open("w") as file, redirect_stdout(file):
            assert command(["describe", str(config), "--tp", "2"]) == 0
        said = StringIO()
        with redirect_stderr(said):
            assert command(["check", str(described), str(described), "--say", "page=16"]) == 1
    assert "--say is of captures, and both files are Descriptions" in said.getvalue()


if __name__ == "__main__":
    main()
