"""Entry points of the engines, which say what to install if torch is missing."""

import importlib
import logging
import sys


def prefill() -> int:
    """`kvproto-prefill`."""
    return _run("prefill")


def decode() -> int:
    """`kvproto-decode`."""
    return _run("decode")


def engine() -> int:
    """`kvproto-engine`."""
    return _run("engine", "moving")


def encode() -> int:
    """`kvproto-encode`."""
    return _run("encode")


def router() -> int:
    """`kvproto-router`."""
    return _run("server", "router")


def _run(role: str, package: str = "demo") -> int:
    logging.basicConfig(format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    try:
        module = importlib.import_module(f"kvproto_reference.{package}.{role}")
    except ModuleNotFoundError as error:
        print(f"error: {error.name} is missing; pip install kvproto-reference", file=sys.stderr)
        return 1
    status: int = module.main()
    return status
