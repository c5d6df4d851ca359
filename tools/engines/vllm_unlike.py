"""Engines that do not fit, or that have no connector: each request concerned ends as it should, and others go on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tools.engines.vllm_engine import ASK, DEADLINE, Engine, new_name, over, prompts
from tools.engines.vllm_models import make

_UNLIKE: dict[str, tuple[dict[str, Any], str]] = {
    "other weights": ({"model": "llama of others"}, "weights.target"),
    "another element type": ({"dtype": "float16"}, "dtype"),
    "another rotary embedding": (
        {"hf_overrides": {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}},
        "rope.target",
    ),
    "pages in an order that has no strides": ({"extra": {"pages": "whole"}}, "LAYOUT_OPAQUE"),
}
"""By title: the settings in which a decode engine differs, and the word by which the log names the difference."""


def unlike(one: Engine, two: Engine) -> Iterator[str]:
    """Decode engines that differ from `one`, one without a connector, and one whose release is not known."""
    (prompt,) = prompts(1, 90, 91, 10)
    alone, models = two.run(new_name(), prompt, 16)[0], Path(two.settings["model"]).parent
    others = {
        title: two.like(
            title.replace(" ", "-"), **{n: str(make(models, v)) if n == "model" else v for n, v in given.items()}
        )
        for title, (given, _) in _UNLIKE.items()
    }
    plain, unknown = two.like("plain", kv=None), two.like("unknown", release="0.31.0")
    everyone = [*others.values(), plain, unknown]
    try:
        for engine in everyone:
            engine.start()
        for title, engine in others.items():
            engine.ready()
            tokens, reason, *_ = over(one, engine, prompt)
            if (tokens, reason) != ([], "error") or _UNLIKE[title][1] not in engine.said():
                yield f"{title}: {tokens}, {reason}, and the log says: {engine.said()}"
            if len(engine.run(new_name(), prompt, 16)[0]) != 16:
                yield f"{title}: the next request is not served"
        plain.ready()
        if (found := over(one, plain, prompt)[0]) != alone:
            yield f"an engine without a connector: {found}, not {alone}"
        try:
            unknown.ready()
            yield "a release that is not known was served"
        except RuntimeError as error:
            if "0.31.0" not in str(error) or "0.32" not in str(error):
                yield f"a release that is not known: {error}"
        if over(one, two, prompt)[0] != alone:
            yield "other tokens afterwards"
        if one.run(new_name(), prompt, 1, ASK)[1] != "length" or not one.idle(DEADLINE + 10):
            yield f"{one.name} has {one.free()}, not {one.blocks} free blocks"
    finally:
        for engine in everyone:
            engine.stop()
