"""The commands that know engines of others: `describe`, and `import` of a capture."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

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
    command = Path(sys.executable).parent / "kvproto"
    with tempfile.TemporaryDirectory() as folder:
        config, described = Path(folder) / "config.json", Path(folder) / "described.json"
        config.write_text(json.dumps(CONFIG))
        described.write_bytes(subprocess.check_output([command, "describe", config, "--tp", "2"]))
        done = subprocess.run([command, "check", described, described, "--say", "page=16"], stderr=subprocess.PIPE)
    assert b"--say is of captures, and both files are Descriptions" in done.stderr


if __name__ == "__main__":
    main()
