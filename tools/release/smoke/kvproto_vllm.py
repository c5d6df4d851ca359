"""The adapter without its engine: it is imported, and says what is missing when it is used."""

import kvproto_vllm


def main() -> None:
    """Ask for the adapter as vLLM does."""
    said = ""
    try:
        kvproto_vllm.KvprotoConnector  # noqa: B018
    except ModuleNotFoundError as error:
        said = str(error)
    assert "kvproto-vllm runs inside of vllm, which this environment lacks" in said, said


if __name__ == "__main__":
    main()
