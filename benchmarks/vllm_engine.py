"""A vLLM engine in a process of its own, for benchmarks/vllm_gpu.py and vllm_handover.py: batches of requests go in, tokens and
times come back; and its model.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import time
from pathlib import Path
from typing import Any

import attrs

__all__ = ["Ask", "Engine", "Got", "make_mla", "make_model"]


@attrs.frozen
class Ask:
    """A request: `after` counts steps of the engine before it comes."""

    name: str
    tokens: list[int]
    most: int = 1
    params: Any = None
    after: int = 0


@attrs.frozen
class Got:
    """Of a request: its tokens, why it ended, its parameters, for each token how far its logit is above the next one's, and
    seconds from its coming to its first token; `came` is when it came, by `time.perf_counter`, the clock of all processes.
    Of its prompt so many tokens were `found`.
    """

    tokens: list[int]
    reason: str
    params: Any
    gaps: list[float]
    first: float
    came: float
    found: int


def gap(logprobs: Any) -> float:
    """Between the two best tokens."""
    best, second = sorted((each.logprob for each in logprobs.values()), reverse=True)[:2]
    return float(best - second)


def serve(pipe: Any, settings: dict[str, Any]) -> None:
    """An engine in a process of its own: batches come over the pipe, and what became of them goes back."""
    import vllm
    from vllm import LLM, SamplingParams
    from vllm.config import KVTransferConfig

    if (transfer := settings.pop("kv", None)) is not None:
        settings["kv_transfer_config"] = KVTransferConfig(**transfer)
    engine = LLM(**settings).llm_engine
    pipe.send(vllm.__version__)
    for batch in iter(pipe.recv, None):
        if batch == "forget":
            pipe.send(engine.reset_prefix_cache())
            continue
        if isinstance(batch, tuple):
            pipe.send(engine.collective_rpc(batch[0], args=batch[1:]))
            continue
        waiting, begun, got, steps = sorted(batch, key=lambda ask: -ask.after), {}, {}, []
        start = last = time.perf_counter()
        while waiting or engine.has_unfinished_requests():
            while waiting and waiting[-1].after <= len(steps):
                ask = waiting.pop()
                extra = {"kv_transfer_params": ask.params} if ask.params else None
                sampling = SamplingParams(
                    temperature=0,
                    max_tokens=ask.most,
                    ignore_eos=True,
                    detokenize=False,
                    extra_args=extra,
                    logprobs=2 if ask.most > 1 else None,
                )
                begun[ask.name] = time.perf_counter()
                engine.add_request(ask.name, {"prompt_token_ids": ask.tokens}, sampling)
            outs = engine.step()
            now = time.perf_counter()
            for out in outs:
                name, found = out.request_id, out.outputs[0]
                first = got[name].first if name in got else now - begun[name]
                gaps = [gap(each) for each in found.logprobs or ()] if out.finished else []
                about = gaps, first, begun[name], out.num_cached_tokens or 0
                got[name] = Got(list(found.token_ids), found.finish_reason, out.kv_transfer_params, *about)
            if outs:
                steps.append(now - last)
                last = now
        pipe.send((got, time.perf_counter() - start, steps))


class Engine:
    """One vLLM."""

    def __init__(
        self, name: str, settings: dict[str, Any], environment: dict[str, str], log: Path, fork: bool = False
    ) -> None:  # fmt: skip
        """`fork`: with the packages that this process has imported, on the CPU."""
        context = multiprocessing.get_context("fork" if fork else "spawn")
        self.name = name
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_start, args=(theirs, settings, environment, str(log)))
        self._process.start()
        theirs.close()
        self._count = 0

    def send(self, prompts: list[list[int]], most: int = 1, params: Any = None, prefix: str = "r") -> list[str]:
        """Ask for a batch; `params` of all, or of each. Returns the requests' names."""
        each = params if isinstance(params, list) else [params] * len(prompts)
        batch = [
            Ask(f"{prefix}{self._count + i}", tokens, most, one)
            for i, (tokens, one) in enumerate(zip(prompts, each, strict=True))
        ]
        self._count += len(batch)
        self.give(batch)
        return [ask.name for ask in batch]

    def give(self, batch: list[Ask]) -> None:
        self._pipe.send(batch)

    def wait(self, seconds: float = 90) -> Any:
        """Wait for the batch: answers by request, its seconds, and those of each step."""
        if not self._pipe.poll(seconds):
            raise TimeoutError(f"{self.name} says nothing")
        return self._pipe.recv()

    def run(self, *args: Any, **named: Any) -> tuple[list[Got], float]:
        names = self.send(*args, **named)
        got, seconds, _ = self.wait()
        return [got[name] for name in names], seconds

    def order(self, seed: int) -> None:
        """Free blocks in order, or scattered by a seed."""
        self.run([[5, 6, 7]], params={"order": seed})

    def forget(self) -> None:
        """Empty the prefix cache."""
        self._pipe.send("forget")
        if self.wait() is False:
            raise RuntimeError(f"{self.name} has requests whose blocks it cannot forget")

    def call(self, name: str, *args: Any) -> list[Any]:
        """The answers of all workers to a call of benchmarks/vllm_connectors.py's `Worker`, by rank."""
        self._pipe.send((name, *args))
        answers: list[Any] = self.wait()
        return answers

    def stop(self) -> None:
        with contextlib.suppress(OSError):  # it may have died
            self._pipe.send(None)
        self._process.join(20)
        self._process.kill()
        if (group := self._process.pid) is not None:
            with contextlib.suppress(ProcessLookupError):  # none is left
                os.killpg(group, signal.SIGKILL)  # its core and workers, which would keep ports and memory


def _start(pipe: Any, settings: dict[str, Any], environment: dict[str, str], log: str) -> None:
    os.setsid()
    os.environ.update(environment)
    out = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(out, 1)
    os.dup2(out, 2)
    serve(pipe, settings)


def make_model(folder: Path, small: bool, heads: int = 8) -> Path:
    """A Llama of 8 layers and so many KV heads of 128, as a folder: random weights, spread so that greedy tokens vary."""
    layers, width, queries, kv, dim, inner, words = (
        (4, 128, 4, min(heads, 2), 32, 256, 512) if small else (8, 1024, 16, heads, 128, 2816, 8192)
    )
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_key_value_heads": kv, "head_dim": dim,
        "attention_bias": False, "mlp_bias": False,
    }  # fmt: skip
    own = {
        "q_proj": (queries * dim, width, 1.5 * width**-0.5), "k_proj": (kv * dim, width, 1.5 * width**-0.5),
        "v_proj": (kv * dim, width, 2 * width**-0.5), "o_proj": (width, queries * dim, 2 * (queries * dim) ** -0.5),
    }  # fmt: skip
    return _written(folder, config, own, layers, width, queries, inner, words)


def make_mla(folder: Path, small: bool = False) -> Path:
    """Four layers of DeepSeek V2's attention, latent 512 and rotary key 64, 16 heads, without experts."""
    layers, width, heads, latent, rope, nope, inner, words = (
        (2, 128, 4, 512, 64, 128, 256, 512) if small else (4, 1024, 16, 512, 64, 128, 2816, 8192)
    )
    config = {
        "architectures": ["DeepseekV2ForCausalLM"], "model_type": "deepseek_v2", "num_key_value_heads": heads,
        "kv_lora_rank": latent, "q_lora_rank": None, "qk_rope_head_dim": rope, "qk_nope_head_dim": nope,
        "v_head_dim": nope, "first_k_dense_replace": layers, "n_routed_experts": 8, "moe_layer_freq": 1,
        "attention_bias": False,
    }  # fmt: skip
    own = {
        "q_proj": (heads * (nope + rope), width, 1.5 * width**-0.5),
        "kv_a_proj_with_mqa": (latent + rope, width, 1.5 * width**-0.5),
        "kv_b_proj": (heads * 2 * nope, latent, 2 * latent**-0.5),
        "o_proj": (width, heads * nope, 2 * (heads * nope) ** -0.5),
    }  # fmt: skip
    return _written(
        folder, config, own, layers, width, heads, inner, words, {"self_attn.kv_a_layernorm.weight": latent}
    )


def _written(
    folder: Path, config: dict[str, Any], own: dict[str, tuple[int, int, float]], layers: int, width: int, heads: int,
    inner: int, words: int, norms: dict[str, int] | None = None,
) -> Path:  # fmt: skip
    """A model as a folder: `own` are the projections of its attention, with rows, columns and spread."""
    import torch
    from safetensors.torch import save_file

    config |= {
        "hidden_size": width, "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": heads,
        "vocab_size": words, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
        "hidden_act": "silu", "tie_word_embeddings": False, "torch_dtype": "bfloat16", "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(7)

    def some(*shape: int, scale: float) -> torch.Tensor:
        return (torch.randn(*shape, generator=generator) * scale).to(torch.bfloat16)

    weights = {"model.embed_tokens.weight": some(words, width, scale=1), "lm_head.weight": some(words, width, scale=1)}
    weights["model.norm.weight"] = torch.ones(width, dtype=torch.bfloat16)
    mlp = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    sizes = {"input_layernorm.weight": width, "post_attention_layernorm.weight": width} | (norms or {})
    for i in range(layers):
        at = f"model.layers.{i}."
        for name, (rows, columns, scale) in own.items():
            weights[f"{at}self_attn.{name}.weight"] = some(rows, columns, scale=scale)
        for name, shape in mlp.items():
            weights[f"{at}mlp.{name}.weight"] = some(*shape, scale=shape[1] ** -0.5)
        weights |= {f"{at}{name}": torch.ones(size, dtype=torch.bfloat16) for name, size in sizes.items()}
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder
