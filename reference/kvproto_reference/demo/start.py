"""Starts the engines of the demo with the command lines that a user would give them."""

import contextlib
from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from ..cache.forms import MODEL
from ..errors import EngineError
from . import decode, encode, prefill
from .arguments import DemoOptions
from .engines import Engines
from .network import free_address, key_folders, namespaces
from .options import STAGES


def start(
    engines: Engines,
    options: DemoOptions,
    folder: Path,
    outside: contextlib.ExitStack,
    more: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Start all replicas of both engines.

    `outside` takes what has to outlive them, and `more` holds further arguments by role. Raises EngineError.
    """
    shared = ["--dir", str(folder), "--target", options.target, "--dtype", options.dtype, "--spread", options.spread,
              "--pages", str(options.pages), "--transport", options.transport,
              "--back-end", options.back_end]  # fmt: skip
    shared += [] if options.verify else ["--no-verify"]
    if options.sampling is not None and options.sampling.logprobs is not None:
        shared += ["--max-logprobs", str(options.sampling.logprobs)]
    shared += [f"--adapter={name}={each}" for name, each in options.adapter]
    shared += ["--pull"] if options.pull else []
    shared += ["--pools", options.pools]
    shared += ["--window-pages", str(options.window_pages)] if options.window_pages else []
    shared += ["--costs", str(options.costs)] if options.costs else []
    here, there = (["--devices", d] if d else [] for d in devices(options))
    part = 1 if options.trouble and options.part is None else options.part  # so that copies are under way throughout
    here += [] if part is None else ["--part", str(part)]
    here += ["--chunk", str(min(options.chunk, 16) if options.trouble else options.chunk)]
    here += ["--tp", str(options.prefill_tp), "--cp", str(options.prefill_cp)]
    here += ["--interleave", str(options.prefill_interleave), "--deal", options.prefill_deal]
    here += ["--framework", options.prefill_framework]
    here += ["--draft", options.draft if options.drafts and not options.cold_draft else "none"]
    there += ["--draft", options.draft, "--speculate", str(options.speculate)]
    shared += ["--cold-draft", options.cold_draft] if options.cold_draft else []
    there += ["--intent"] * options.intent + ["--spans"] * options.spans
    there += ["--framework", options.decode_framework]
    there += ["--tp", str(options.decode_tp), "--dcp", str(options.dcp), "--interleave", str(options.interleave)]
    there += ["--deal", options.deal]
    there += ["--exchange", options.exchange, "--sources", str(options.prefill_dp), "--quiet"]
    there += ["--draft-sharded"] if options.draft_sharded else []
    there += ["--replicate-q"] if options.replicate_q else []
    there += ["--captured"] if options.captured else []
    forms = options.prefill_kv_dtype, options.decode_kv_dtype
    for own, form, other in ((here, *forms), (there, *forms[::-1])):
        own += ["--kv-dtype", form] if form != MODEL else ["--kv-converts", other] if other != MODEL else []
    places: dict[str, str] = {}
    if options.tcp or options.namespaces:
        address = free_address(options.prefill_dp, options.prefill_pp * options.prefill_cp * options.prefill_tp)
        if options.namespaces:
            places, address = outside.enter_context(namespaces())
        prefill_keys, decode_keys = key_folders(folder)
        shared += ["--prefill", address]
        here += ["--keys", str(prefill_keys)]
        there += ["--keys", str(decode_keys), "--source-key", str(prefill_keys / "public.key")]
    if options.images:
        here += ["--images"]
        own = ["--tp", str(options.encoder_tp), "--target", options.target, "--seed", str(options.encoder_seed)]
        own += [] if options.verify else ["--no-verify"]
        engines.start("encoder-0", encode.main, ["--dir", str(folder), "--transport", options.transport, *own])
    for role, main, own, replicas in (
        ("prefill", prefill.main, here, options.prefill_dp),
        ("decode", decode.main, there, options.decode_dp),
    ):
        given = {name: getattr(options, f"{role}_{name.replace('-', '_')}") for name in STAGES}
        own += [f"--{name}={number}" for name, number in given.items() if number is not None]
        own += ["--page-size", str(options.page_size_of(role)), *(more or {}).get(role, ())]
        own += ["--dp", str(replicas)] if options.dp_attention else []
        for replica in range(1 if options.dp_attention else replicas):
            engines.start(f"{role}-{replica}", main, [*shared, *own, "--replica", str(replica)], places.get(role))


def devices(options: DemoOptions) -> tuple[str, str]:
    """GPUs of the prefill and of the decode engine: those asked for, or half of all GPUs each; raises EngineError.

    Where that half is too small to give each rank a GPU, but all of them are enough, the engines share them.
    """
    if options.transport != "cuda":
        given = [d or "" for d in (options.prefill_devices, options.decode_devices)]
        return (given[0], given[1]) if options.transport == "nixl" else ("", "")
    count = torch.cuda.device_count()
    if not count:
        raise EngineError("--transport cuda needs a GPU")
    half = max(count // 2, 1)
    prefill, decode = list(range(half)), list(range(half % count, count))
    if half < options.prefill_pp * options.prefill_cp * options.prefill_tp <= count:
        prefill += decode
    if len(decode) < options.decode_pp * options.decode_tp <= count:
        decode += range(half % count)
    first, second = (",".join(map(str, gpus)) for gpus in (prefill, decode))
    return options.prefill_devices or first, options.decode_devices or second
