"""vLLM and SGLang hand prompts over to each other: `ENGINE/python -m tools.engines.cross_pd FOLDER [MODEL ...]`.

As sglang_pd.py; the router is this program: it makes the ticket of a room, or hands on what the prefill engine answered.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from kvproto import write_ticket
from kvproto_sglang import ticket_of
from tools.engines import sglang_engine as sg
from tools.engines import vllm_engine as vl
from tools.engines.sglang_bench import CORRUPT

__all__ = ["main"]


def to_vllm(prefill: sg.Engine, decode: vl.Engine, prompt: list[int], corrupt: bool = False) -> Any:
    """SGLang prefills, vLLM decodes: both are asked at once, one with the room and one with its ticket."""
    number = sg.room()
    ticket = write_ticket(ticket_of(number, f"{prefill.name}:1", 0, sg.DEADLINE))
    first, second = sg.name(), ("corrupt-" if corrupt else "") + sg.name()
    decode.add(second, prompt, sg.MOST, {"do_remote_prefill": True, "ticket": ticket})
    prefill.add(first, prompt, **sg.where(prefill, number))
    tokens, reason, _, cached = decode.result(second)
    prefill.result(first)
    return tokens, f"{reason}, {cached} cached"


def to_sglang(prefill: vl.Engine, decode: sg.Engine, prompt: list[int], corrupt: bool = False) -> Any:
    """vLLM prefills, SGLang decodes: it gets the ticket and the token that vLLM answered."""
    answer, _, params, _ = prefill.run(sg.name(), prompt, 1, vl.ASK)
    given = {"ticket": json.dumps(params["ticket"]), "first_token": answer[0]}
    body: dict[str, Any] = {
        "bootstrap_host": "router",
        "bootstrap_port": 0,
        "bootstrap_room": sg.room() | CORRUPT * corrupt,
    }
    request = sg.name()
    decode.add(request, prompt, sampling={"custom_params": {"kvproto": given}}, **body)
    tokens, said = decode.result(request)
    return tokens, str(said["finish_reason"])


def same_tokens(alone: sg.Alone, over: Callable[..., Any], one: Any, two: Any) -> Iterator[str]:
    """The tokens are those of the model alone."""
    for prompt in sg.prompts(4, 40, 200):
        (tokens, said), wanted = over(one, two, prompt), alone.run(prompt)[0]
        if tokens != wanted:
            yield f"prompt of {len(prompt)}: {tokens}, not {wanted}: {said}"


def one_bit(alone: sg.Alone, over: Callable[..., Any], one: Any, two: Any) -> Iterator[str]:
    """A bit of a page that arrived is flipped: other tokens."""
    (prompt,) = sg.prompts(1, 100, 101, 1)
    if over(one, two, prompt, corrupt=True)[0] == alone.run(prompt)[0]:
        yield "the same tokens: the pages were not used"


MODELS: dict[str, dict[str, Any]] = {
    "llama": {"block_size": 32, "enable_prefix_caching": False},
    "mla": {"block_size": 16, "compilation_config": {"custom_ops": ["-rotary_embedding"]}},
}
"""What a vLLM is started with, by model."""


def tried(models: Path, model: str, folder: str) -> int:
    """Both ways; how many cases differ."""
    shared, wrong = sg.settings_of(models, model), 0
    path = shared["model_path"]
    own = {"metadata": "request", "deadline": sg.DEADLINE, "sources": {"vllm": f"ipc://{folder}/vllm-0"}}
    vllm = vl.Engine.of("vllm", folder, [], "fail", model=path, **MODELS[model])
    vllm.settings["kv"]["kv_connector_extra_config"]["sources"] = {"p64:1": f"ipc://{folder}/p64-0"}
    vllm.start()
    prefill = sg.Engine.prefill("p64", folder, **shared, page_size=64, chunked_prefill_size=128)
    decode = sg.Engine.start("d16", shared | {"page_size": 16, "disaggregation_mode": "decode"}, own)
    try:
        alone = sg.Alone(path)
        for engine in (vllm, prefill, decode):
            engine.ready()
        block = MODELS[model]["block_size"]
        for title, over, one, two in (
            (f"SGLang, page 64, to vLLM, block {block}", to_vllm, prefill, vllm),
            (f"vLLM, block {block}, to SGLang, page 16", to_sglang, vllm, decode),
        ):
            for case in (same_tokens, one_bit, same_tokens):
                found = list(case(alone, over, one, two))
                wrong += sg.told(f"{model}: {title}: {case.__name__.replace('_', ' ')}", found)
    finally:
        prefill.kill()
        decode.kill()
        vllm.stop()
    return wrong


def main(argv: list[str]) -> int:
    """Print each case and whether it went well; the exit status."""
    models, chosen = Path(argv[0]), argv[1:] or list(MODELS)
    begun, wrong = time.monotonic(), 0
    with tempfile.TemporaryDirectory() as folder:
        sg.plug_in(folder)
        for model in chosen:
            wrong += tried(models, model, folder)
    print(f"{wrong} differ, {time.monotonic() - begun:.0f} s", flush=True)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
