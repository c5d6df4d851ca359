"""The adapter without its engine: it is imported, and says what is missing when it is used."""

from importlib.metadata import entry_points

import kvproto_sglang


def main() -> None:
    """Ask for the adapter as SGLang does."""
    (plugin,) = entry_points(group="sglang.srt.plugins")
    assert plugin.load() is kvproto_sglang.register
    said = ""
    try:
        kvproto_sglang.register()
    except ModuleNotFoundError as error:
        said = str(error)
    assert "kvproto-sglang runs inside of sglang, which this environment lacks" in said, said


if __name__ == "__main__":
    main()
