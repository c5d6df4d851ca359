"""Frames of SGLang's prefill-decode plane, made by the package's own encoders and read back by its own parsers.

    pip download --no-deps -d wheels sglang==0.5.23 && unzip -q wheels/sglang-0.5.23-*.whl -d tree
    python -m tools.engines.sglang_frames tree 0.5.23 tests/captures/recordings/sglang-0.5.23.jsonl

No GPU and no dependency of SGLang is needed: of the wheel only `sglang.srt.disaggregation` is imported, the rest is
stand-ins (stubs.py). Each line holds one message: who made it, its frames as hex, and what the package's parser reads.
"""

from __future__ import annotations

import asyncio
import dataclasses
import importlib
import importlib.util
import inspect
import json
import sys
from collections import defaultdict
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from tools.engines.stubs import Stub, install

_NAME = "6c0fce0e-9a1f-4f6e-b1b4-5d0c9a3f2e71"
_AGENT: list[bytes] = []
ROOM = 7_305_441_908_217_345
PAGES = np.array([7, 8, 9, 20, 21], np.int32)


class Sockets:
    """In place of ZeroMQ's: keeps what is sent; stands for the socket, and for socket and lock."""

    def __init__(self) -> None:
        self.sent: list[list[bytes]] = []

    def send_multipart(self, frames: list[bytes], *flags: Any, **more: Any) -> None:
        self.sent.append([bytes(f) for f in frames])

    def __iter__(self) -> Iterator[Any]:
        return iter((self, nullcontext()))


def main(argv: list[str]) -> int:
    """Write the captures of one release: TREE RELEASE FILE; the exit status."""
    tree, release = Path(argv[0]), argv[1]
    _AGENT.append(_agent_metadata())
    install(tree, "sglang", ["sglang.srt.disaggregation"])
    lines = []
    for record in _bootstrap(release):
        lines.append(json.dumps({"package": "sglang", "release": release, "backend": "http", **record}))
    for backend in ("mooncake", "nixl"):
        conn = importlib.import_module(f"sglang.srt.disaggregation.{backend}.conn")
        nested = _nested(conn)
        for record in _records(conn, backend, nested):
            lines.append(json.dumps({"package": "sglang", "release": release, "backend": backend, **record}))
    Path(argv[2]).write_text("\n".join(lines) + "\n")
    return 0


def _nested(conn: Any) -> bool:
    """Whether state components are lists of lists in this release."""
    return hasattr(conn, "pack_int_lists")


def _has(name: str) -> bool:
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # of a parent
        return False


def _records(conn: Any, backend: str, nested: bool) -> Iterator[dict[str, Any]]:
    for variant in ("plain", "hybrid", "staging") if hasattr(conn, "KVArgsRegisterInfo") else ():
        yield from _registration(conn, backend, variant, nested)
    for variant in ("plain", "dummy", "hybrid"):
        yield from _transfer(conn, backend, variant, nested)
    if backend == "mooncake":
        yield from _aborted(conn, nested)
    if backend == "mooncake" and _has("sglang.srt.disaggregation.common.staging_handler"):
        yield from _staged(conn, nested)


def _kv_args(variant: str, nested: bool) -> SimpleNamespace:
    """The registration of a decode rank: two layers, K then V; the hybrid has two state components and layer ids."""
    pages, item = 1024, 65_536
    hybrid = variant == "hybrid"
    pointers = [0x7F10_0000_0000 + i * 0x400_0000 for i in range(4)]
    state = [[0x7F20_0000_0000, 0x7F20_0001_0000], [0x7F21_0000_0000]] if hybrid else []
    lens, dims = ([[24_576, 24_576], [1_048_576]], [[4_096, 4_096], [32]]) if hybrid else ([], [])
    ids = [[0, 2], [0]] if hybrid else []

    def flat(lists: list[list[int]]) -> list[Any]:
        return list(lists) if nested else [n for part in lists for n in part]

    return SimpleNamespace(
        engine_rank=3, gpu_id=5, decode_tp_size=4, page_size=16,
        kv_data_ptrs=pointers, kv_data_lens=[pages * item] * 4, kv_item_lens=[item, item, item, item],
        kv_data_mem_kinds=["VRAM", "VRAM", "DRAM", "DRAM"] if hybrid else ["VRAM"] * 4,
        aux_data_ptrs=[0x7F30_0000_0000, 0x7F30_0000_1000, 0x7F30_0000_2000], aux_data_lens=[4096] * 3,
        aux_item_lens=[64] * 3, kv_layer_ids=[1, 3, 1, 3] if hybrid else [],
        state_data_ptrs=flat(state), state_data_lens=[[n * 8 for n in part] for part in lens],
        state_item_lens=flat(lens), state_dim_per_tensor=flat(dims), state_layer_ids=ids,
    )  # fmt: skip


def _manager(conn: Any, backend: str, variant: str, nested: bool) -> Any:
    cls = getattr(conn, "MooncakeKVManager" if backend == "mooncake" else "NixlKVManager")
    made = object.__new__(cls)
    staging = variant == "staging"
    allocator: Any = SimpleNamespace(get_base_ptr=lambda: 0x7C00_4020_0000, get_total_size=lambda: 4 << 30)
    agent = SimpleNamespace(name=_NAME, get_agent_metadata=lambda: _AGENT[0])
    for name, value in {
        "kv_args": _kv_args(variant, nested), "local_ip": "10.0.7.2", "rank_port": 41_873, "attn_tp_size": 4, "tp_size": 4,
        "dp_size": 1, "attn_tp_rank": 3, "dcp_size": 2 if variant == "hybrid" else 1, "dcp_rank": int(variant == "hybrid"),
        "enable_staging": staging, "_staging_ctx": SimpleNamespace(allocator=allocator if staging else None),
        "kv_buffer_tensors": {"slot_layer_ids": [0, 1, 0, 1]} if staging else None, "agent": agent,
        "enable_hisparse": False, "server_args": SimpleNamespace(enable_hisparse=False),
        "transfer_statuses": defaultdict(SimpleNamespace), "get_session_id": lambda: "10.0.7.2:15733",
        "request_status": {}, "register_staging_room_bootstrap": lambda *args: None,
        "engine": SimpleNamespace(get_session_id=lambda: "10.0.7.2:15733"),
    }.items():  # fmt: skip
        setattr(made, name, value)
    return made


def _agent_metadata() -> bytes:
    """NIXL's own blob, of an agent without memory; made before the stand-ins, as NIXL needs the real torch."""
    try:
        from nixl._api import nixl_agent, nixl_agent_config
    except ImportError:  # where frames are only compared
        return b"nixlSerDes|"
    agent = nixl_agent(_NAME, nixl_agent_config(backends=["UCX"]))
    return bytes(agent.get_agent_metadata())


def _receiver(conn: Any, backend: str, manager: Any, dummy: bool) -> tuple[Any, Sockets]:
    cls = getattr(conn, "MooncakeKVReceiver" if backend == "mooncake" else "NixlKVReceiver")
    made, sockets = object.__new__(cls), Sockets()
    info = {"rank_ip": "10.0.7.1", "rank_port": 40_001, "is_dummy": dummy}
    for name, value in {
        "kv_mgr": manager, "bootstrap_infos": [info], "bootstrap_info": [{3: info}], "session_id": "10.0.7.2:15733",
        "bootstrap_room": ROOM, "bootstrap_addr": "10.0.7.1:8998", "required_dst_info_num": 2,
    }.items():  # fmt: skip
        setattr(made, name, value)
    made._connect = lambda *args, **more: sockets
    made._connect_to_bootstrap_server = lambda *args: sockets
    return made, sockets


def _registration(conn: Any, backend: str, variant: str, nested: bool) -> Iterator[dict[str, Any]]:
    manager = _manager(conn, backend, variant, nested)
    if hasattr(manager, "build_receiver_registration_message"):
        maker, sent = manager, [manager.build_receiver_registration_message()]
        name = "build_receiver_registration_message"
    else:
        maker, sockets = _receiver(conn, backend, manager, False)
        name = "_register_kv_args"
        _run(conn, maker._register_kv_args)
        sent = sockets.sent
    for frames in sent:
        parsed = _parsed(conn.KVArgsRegisterInfo, frames, backend)
        yield _record(maker, name, variant, "registration", frames, parsed)


def _transfer(conn: Any, backend: str, variant: str, nested: bool) -> Iterator[dict[str, Any]]:
    manager = _manager(conn, backend, variant, nested)
    dummy, hybrid = variant == "dummy", variant == "hybrid"
    state = ([[37], [4, 5, 6]] if nested else [37, 38]) if hybrid else None
    given = {
        "kv_indices": PAGES, "aux_index": 11, "state_indices": state, "decode_prefix_len": 64 if hybrid else None,
        "device_kv_indices": PAGES + 100 if hybrid else None,
    }  # fmt: skip
    if hasattr(manager, "build_receiver_metadata_message"):
        maker, name = manager, "build_receiver_metadata_message"
        sent = [maker.build_receiver_metadata_message(
            bootstrap_room=ROOM, required_dst_info_num=2, is_dummy=dummy, **given
        )]  # fmt: skip
    else:
        maker, sockets = _receiver(conn, backend, manager, dummy)
        name = "send_metadata" if hasattr(maker, "send_metadata") else "init"
        method = getattr(maker, name)
        known = inspect.signature(method).parameters
        if "int64" in str(known["kv_indices"].annotation):
            given["kv_indices"] = PAGES.astype(np.int64)
        _run(conn, lambda: method(**{k: v for k, v in given.items() if k in known}))
        sent = sockets.sent
    for frames in sent:
        yield _record(maker, name, variant, "transfer", frames, _parsed(conn.TransferInfo, frames, backend))


def _aborted(conn: Any, nested: bool) -> Iterator[dict[str, Any]]:
    """A decode rank gives a request up, before and after it awaits an acknowledgement."""
    for variant in ("plain", "generation"):
        manager = _manager(conn, "mooncake", "plain", nested)
        manager.enable_deferred_decode_kv_release = variant == "generation"
        manager.register_deferred_abort_room = lambda room: 17
        receiver, sockets = _receiver(conn, "mooncake", manager, False)
        receiver.init_time, receiver._abort_generation = 1.0, None
        if hasattr(receiver, "_send_abort_notification"):
            receiver._send_abort_notification()
            for frames in sockets.sent:
                given = {"room": ROOM, "decode_ip": "10.0.7.2", "decode_port": 41_873, "generation": 17}
                yield _record(receiver, "_send_abort_notification", variant, "common.abort", frames, given)


def _staged(conn: Any, nested: bool) -> Iterator[dict[str, Any]]:
    """A prefill rank asks for room in the staging buffer, is answered, says what is there; room is given back."""
    handler: Any = importlib.import_module("sglang.srt.disaggregation.common.staging_handler")
    manager = _manager(conn, "mooncake", "staging", nested)
    receiver, sockets = _receiver(conn, "mooncake", manager, False)
    receiver.chunk_staging_infos = []
    manager.kv_args.kv_head_num = manager.kv_args.total_kv_head_num = 8
    peer = SimpleNamespace(
        is_dummy=False, dst_kv_indices=PAGES, endpoint="10.0.7.2", dst_port=41_873, room=ROOM,
        mooncake_session_id="10.0.7.2:15733",
    )  # fmt: skip

    class Sent(dict[Any, Any]):
        def __contains__(self, key: object) -> bool:
            return True

        def __getitem__(self, key: Any) -> Any:
            return sockets

    ranks = [None, 1] if "requester_pp_rank" in inspect.signature(handler.prefetch_staging_reqs).parameters else [None]
    for rank in ranks:
        more = {} if rank is None else {"requester_pp_rank": rank}
        waiting = {ROOM: {"10.0.7.2:15733": peer}}
        handler.prefetch_staging_reqs(ROOM, waiting, {"page_size": 16}, 64, set(), Sent(), **more)
    asked = list(sockets.sent)
    peer_name = {"room": ROOM, "session_id": "10.0.7.2:15733"}
    for i, frames in ((0, asked[0]), (1, asked[-1])):
        given = {**peer_name, "chunk_idx": i, "chunk_num_pages": (4, 1)[i], "pp_rank": 1}
        variant = "plain" if len(frames) < 6 else "stage"
        yield _record(handler.prefetch_staging_reqs, "", variant, "staging.request", frames, given)
    sockets.sent.clear()
    allocator = SimpleNamespace(
        assign=lambda size: (5, 8_192, 2), free=lambda id: None, get_watermark=lambda: (3, 65_536)
    )
    info = {**receiver.bootstrap_infos[0], "pp_rank": 1}
    handler.handle_staging_req(asked[0], allocator, manager.kv_args, 4, 2, None, {ROOM: receiver}, {ROOM: [info]})
    given = {**peer_name, "chunk_idx": 0, "offset": 8_192, "round": 2}
    yield _record(handler.handle_staging_req, "", "plain", "staging.answer", sockets.sent.pop(), given)
    made = object.__new__(handler.DecodeStagingHandler)
    made.staging_allocator, made._wm_subscribers = allocator, {"": (receiver, "10.0.7.2:15733")}
    made._free_and_send_watermark(5, SimpleNamespace(req=SimpleNamespace(bootstrap_room=ROOM)))
    yield _record(
        made,
        "_free_and_send_watermark",
        "plain",
        "staging.watermark",
        sockets.sent.pop(),
        {**peer_name, "round": 3, "tail": 65_536},
    )
    yield from _staged_chunk(manager, sockets, peer)


def _staged_chunk(manager: Any, sockets: Any, peer: SimpleNamespace) -> Iterator[dict[str, Any]]:
    """Sends the message that a chunk is in the staging buffer."""
    manager._connect = lambda *args, **more: sockets
    manager._send_multipart_locked = lambda where, frames, **more: sockets.send_multipart(frames)
    if hasattr(manager, "_send_chunk_ready"):
        chunk = SimpleNamespace(index_slice=slice(4, 9), prefill_kv_indices=PAGES)
        manager._send_chunk_ready(peer, 1, chunk, 6)
    else:
        for key, value in {"attn_tp_rank": 3, "pp_size": 2, "attn_cp_size": 1, "pp_rank": 0, "attn_cp_rank": 0}.items():
            setattr(manager, key, value)
        manager.send_chunk_ready(
            room=ROOM,
            chunk_idx=1,
            page_start=4,
            num_pages=5,
            writer_id="10.0.7.2:15733",
            targets=[("10.0.7.2", 41_873)],
        )
    name = "_send_chunk_ready" if hasattr(manager, "_send_chunk_ready") else "send_chunk_ready"
    expected = {
        "room": ROOM,
        "chunk_idx": 1,
        "page_start": 4,
        "num_pages": 5,
        "writer_id": "10.0.7.2:15733",
        "prefill_rank": 6,
    }
    yield _record(manager, name, "plain", "staging.chunk", sockets.sent.pop(), expected)


def _bootstrap(release: str) -> Iterator[dict[str, Any]]:
    """Yield a prefill rank's message to the bootstrap server, and then the server's answer to a decode rank."""
    where = "common" if _has("sglang.srt.disaggregation.common.conn") else "mooncake"
    conn: Any = importlib.import_module(f"sglang.srt.disaggregation.{where}.conn")
    manager = getattr(conn, "CommonKVManager" if where == "common" else "MooncakeKVManager")
    name = next((n for n in ("register_to_bootstrap", "_register_to_bootstrap") if hasattr(manager, n)), None)
    if name is None:
        return
    put: list[Any] = []

    def put_(url: str, **more: Any) -> Any:
        put.append(more["json"])
        return Stub()

    conn.requests = SimpleNamespace(put=put_)
    shared = SimpleNamespace(
        enable_cp_tp_group_sharing=False, load_balance_method="round_robin", enable_dsa_cache_layer_split=False,
        enable_kv_cache_sharding=False, port=30_000, disaggregation_decode_allocation_policy="early",
        kv_cache_dtype="bfloat16",
    )  # fmt: skip
    conn.get_parallel = conn.get_serving = conn.get_disagg = lambda: shared
    conn.get_local_ip_by_remote = lambda *args: "10.0.7.1"
    conn.envs = SimpleNamespace(
        SGLANG_RUST_SERVER=SimpleNamespace(get=lambda: False),
        SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL=SimpleNamespace(get=lambda: 120),
    )
    made = object.__new__(manager)
    for key, value in {
        "dist_init_addr": None, "bootstrap_host": "10.0.7.1", "bootstrap_port": 8998, "attn_tp_size": 4, "attn_tp_rank": 3,
        "attn_cp_size": 1, "attn_cp_rank": 0, "attn_dp_size": 1, "attn_dp_rank": 0, "pp_size": 2, "pp_rank": 1,
        "system_dp_size": 1, "system_dp_rank": 0, "local_ip": "10.0.7.1", "rank_port": 40_001, "tp_size": 4, "dp_size": 1,
        "kv_args": SimpleNamespace(page_size=16, engine_rank=3), "server_args": shared, "kv_cache_dtype_str": "bfloat16",
        "kv_layout": None, "dsv41_spec_layout": None, "is_support_dp": True,
    }.items():  # fmt: skip
        setattr(made, key, value)
    getattr(made, name)()
    function = f"{manager.__module__}.{manager.__qualname__}.{name}"
    yield {"message": "bootstrap.put", "function": function, "variant": "plain", "json": put[0]}
    server = getattr(conn, "CommonKVBootstrapServer", None)
    if hasattr(conn, "PrefillServerInfo") and server is not None:
        told = asyncio.run(_ask(conn, server, put[0]))
        function = f"{server.__module__}.{server.__qualname__}._handle_route_get"
        yield {"message": "bootstrap.info", "function": function, "variant": "plain", "json": told}


async def _ask(conn: Any, server: Any, row: dict[str, Any]) -> Any:
    """Each rank's row goes in, the answer to a decode rank comes out."""
    said: list[Any] = []
    conn.web = SimpleNamespace(
        Application=Stub, Response=Stub(), json_response=lambda data, **more: said.append(data), Request=Stub
    )
    server.run = lambda self: None
    made = server("127.0.0.1", 8998)
    for rank in range(8):
        one = {**row, "attn_tp_rank": rank % 4, "pp_rank": rank // 4}
        request = SimpleNamespace(json=lambda one=one: _soon(one), method="PUT")
        await made._handle_route_put(request)
    whole = dict.fromkeys(("prefill_dp_rank", "prefill_cp_rank", "target_tp_rank", "target_pp_rank"), "-1")
    await made._handle_route_get(SimpleNamespace(query=whole))
    return said[-1]


async def _soon(value: Any) -> Any:
    return value


def _run(conn: Any, method: Any) -> None:
    """With the address of this machine, which old releases look up, held fixed."""
    conn.get_local_ip_by_remote = lambda *args: "10.0.7.2"
    method()


def _parsed(cls: Any, frames: list[bytes], backend: str) -> dict[str, Any]:
    """The result of the package's own parser."""
    info = cls.from_zmq(frames[1:] if backend == "nixl" else frames)
    return {f.name: _plain(getattr(info, f.name)) for f in dataclasses.fields(info)}


def _plain(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.integer):
        return value.tolist()
    if isinstance(value, bytes):
        return value.hex()
    if dataclasses.is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    return [_plain(v) for v in value] if isinstance(value, list | tuple) else value


def _record(
    maker: Any, name: str, variant: str, message: str, frames: list[bytes], parsed: dict[str, Any]
) -> dict[str, Any]:
    owner = maker if inspect.isfunction(maker) else type(maker)
    function = f"{owner.__module__}.{owner.__qualname__}.{name}".rstrip(".")
    return {
        "message": message, "function": function, "variant": variant, "frames": [f.hex() for f in frames], "parsed": parsed,
    }  # fmt: skip


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
