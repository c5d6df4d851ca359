"""Command-line options of the prefill and the decode engine."""

import argparse
import importlib.util
import socket
from collections.abc import Mapping
from pathlib import Path

import attrs

from kvproto import Options, Seed, read_sources
from kvproto.calibration import Probe, load
from kvproto.options import Spread
from kvproto_discovery import Etcd, FoundSources, read_found
from kvproto_discovery.places import SCHEMES, etcd_of

from ..adapters import NO_ADAPTERS, Adapters, adapters_of
from ..attention.exchange import EXCHANGES, ON_CUDA
from ..attention.flashinfer_kernel import KERNELS
from ..cache.forms import FORMS, MODEL
from ..cache.memory import Allocate, of_jax, shareable
from ..cache.windows import needed
from ..checkpoint import CHECKPOINTS, check_draft, load_config, shared_tokenizer, shipped_head
from ..engine.description import Layout, hidden_of
from ..errors import EngineError
from ..models import ModelConfig
from ..tokenizer import Tokenizer

POOLS = {"own": shareable, "jax": of_jax}
"""Allocators of the pools, by name."""
PORTS = 256
"""TCP ports from one prefill replica to the next."""
REPLICAS = 64
FRAMEWORKS = ("torch", "jax", "jax.distributed")
"""The last is JAX with each rank in a process of its own."""
ROLES = ("prefill", "decode", "both")
"""Kinds of requests that `kvproto-engine` takes."""
TRANSPORT_HELP = "how the bytes move: shm, inline, cuda, nixl, or any other installed transport (default shm)"


SHIPPED = {"target": ("mla", "gqa", "small", "hybrid", "moe"), "draft": ("mla", "gqa")}
"""Names of the targets that are shipped, and of the drafts."""
HEADS = {"eagle": "eagle3", "mtp": "mtp"}
"""Names of drafts that are heads of their target, and the form of these."""
COLD = ("compute", "zero")
"""Ways to begin a draft that prefill lacks."""
DP = "replicas in this engine that share the experts of the target, each with attention of its own (default 1)"
SPECULATE = "tokens that the draft proposes per step; 0: no draft (default 4)"
KV_DTYPE = "form of stored rows: as the model, or FP8 with one scale or one for each token and head (default model)"
DEAL = "which rank stores each run: cyclic, zigzag, or R,R,... until the pattern repeats (default cyclic)"
"""The help text of every option that takes a deal."""


def _names(text: str) -> tuple[str, ...]:
    """Comma-separated names."""
    return tuple(name for name in text.split(",") if name)


def numbers(text: str) -> tuple[int, ...]:
    """Comma-separated numbers."""
    return tuple(int(n) for n in text.split(",") if n)


@attrs.frozen(kw_only=True)
class EngineOptions:
    """The options of one engine."""

    name: str
    folder: Path
    """Private directory of the control socket, and of the ipc addresses."""
    address: str
    """Address of the prefill engine, from which `rank_address` derives those of its ranks."""
    advertise: str | None
    """Address at which decode reaches the prefill engine, if not at `address`."""
    target: Path
    draft: Path | None
    dtype: str
    layout: Layout
    replica: int
    """The number of this data-parallel replica; with DP attention, of the first of this engine."""
    pages: int
    page_size: int
    window_pages: int | None
    """Pages of the pool in which sliding windows move; None: as many as the others have."""
    chunk: int
    part: int | None
    """Bytes of computed rows that are worth a separate copy; None: kvproto's default."""
    speculate: int
    verify: bool
    insecure: bool
    keys: Path | None
    """The folder of this engine's CURVE keys."""
    seeds: Mapping[tuple[str, int], Seed]
    """For decode: where each prefill replica listens."""
    seed: int
    transport: str
    devices: tuple[int, ...]
    """GPUs of the ranks, in turn; empty: the host."""
    role: str = ""
    """Of an engine that can do both: one of ROLES, with which it begins; empty for the others."""
    pull: bool = False
    """Whether decode reads the pages, instead of prefill writing them."""
    spread: Spread = "even"
    """The rule for ranks of prefill that have the same, as `kvproto.Options` has it."""
    cold_draft: str | None = None
    """The beginning of a draft whose cache prefill lacks: a name of COLD; None: decode refuses such a prefill."""
    host_pages: int = 0
    """Pages that stay on the host after their requests; 0: none, and no storage."""
    storage: str | None = None
    """The place to which pages go from the host, as `kvproto.Tiers` takes it; None: nowhere."""
    max_logprobs: int | None = None
    """The most likeliest tokens whose log probabilities a request may ask for; None: it may ask for none."""
    intent: bool = False
    """Whether decode claims pages when prefill is over, instead of at the beginning."""
    spans: bool = False
    """Whether decode claims pages piece by piece while prefill runs, instead of at the beginning."""
    pools: str = "own"
    """A key of POOLS."""
    framework: str = "torch"
    """A key of FRAMEWORKS."""
    back_end: str = "torch"
    """The back end of attention in torch: one of KERNELS."""
    captured: bool = False
    """Whether decode's steps of one token are CUDA graphs."""
    adapters: Adapters = NO_ADAPTERS
    """LoRA adapters of the target, which requests name."""
    images: bool = False
    """Whether an encoder engine in the folder makes rows of images, for prefill."""
    found: FoundSources | None = None
    """For decode: prefill replicas that a directory names, in place of `seeds`."""
    register: Etcd | None = None
    """For prefill: the directory in which each rank keeps a row."""
    feed: bool = False
    """Whether `kvproto top` and `kvproto tail` may look on, at feed-NAME-REPLICA-RANK in the folder."""
    probes: str | None = None
    """HOST:PORT at which the process of rank 0 answers probes."""
    quiet: bool = False
    """Whether to print nothing about sources that come and go, which the router reports."""
    drain_for: float = 30.0
    """Seconds that SIGTERM leaves what is under way; 0: it is lost at once."""
    costs: Probe | None = None
    """Measurements of `kvproto probe`, from which a transport chooses how to move runs of each length."""

    @property
    def processes(self) -> int:
        """Processes of a replica: one for all ranks in JAX, otherwise one for each."""
        return 1 if self.framework == "jax" else self.layout.ranks

    def device(self, rank: int) -> int | None:
        """The GPU of a rank; None: the host."""
        return self.devices[rank % len(self.devices)] if self.devices else None

    def of(self, replica: int) -> "EngineOptions":
        """The options of one of the engine's replicas."""
        return attrs.evolve(self, replica=self.replica + replica)

    @property
    def gpus(self) -> tuple[int, ...]:
        """The GPU of each process, if each has one of its own and experts are not shared; otherwise none."""
        used = {self.device(rank) for rank in range(self.processes)} - {None}
        apart = len(used) == self.processes > 1 and self.layout.dp == 1 and self.framework == "torch"
        return tuple(self.devices[: self.processes]) if apart else ()

    @property
    def memory(self) -> Allocate:
        """The allocator of the pools."""
        return POOLS[self.pools]

    @property
    def folders(self) -> tuple[Path, ...]:
        """Checkpoints of the target, and of the draft if there is one."""
        return (self.target,) if self.draft is None else (self.target, self.draft)

    @property
    def configs(self) -> tuple[ModelConfig, ...]:
        """Their configs."""
        return tuple(load_config(folder, self.dtype) for folder in self.folders)

    def check(self, role: str) -> None:
        """Raise EngineError for models that do not fit each other, the ranks, or the other options."""
        configs = self.configs
        self.layout.check(configs)
        check_draft(self.folders, configs)
        if configs[0].hybrid:
            self._check_hybrid()
        if self.window_pages and configs[0].window is None:
            raise EngineError("--window-pages is of sliding windows, which this target has none of: leave it out")
        if self.layout.exchange in ON_CUDA and (configs[0].dtype == "float32" or configs[0].value_dim % 8):
            raise EngineError(
                f"--exchange {self.layout.exchange} moves 8 elements of 16 bits at a time: choose --dtype bfloat16, or"
                f" another exchange, for outputs of {configs[0].value_dim} elements in {configs[0].dtype}"
            )
        if self.captured and any(config.moe for config in configs):
            raise EngineError("the host looks which experts are chosen, which no graph does: leave --captured out")
        if not hidden_of(configs):
            return
        for wrong, says in (
            (self.captured, "CUDA graphs keep no hidden states, which a head reads: leave --captured out"),
            (self.layout.draft_sharded and self.layout.cp > 1,
             "a head is not dealt over ranks of prefill: leave --draft-sharded out"),
            (self.cold_draft == "compute" and role == "decode",
             "--cold-draft compute needs the target's hidden states of the whole prompt, which a prefill without the"
             " head does not hand over: choose --cold-draft zero"),
        ):  # fmt: skip
            if wrong:
                raise EngineError(says)

    def _check_hybrid(self) -> None:
        """Raise EngineError for what the engines do not do with recurrent states and sliding windows."""
        layout, target = self.layout, self.configs[0]
        window = needed(target, self.page_size, max(self.chunk, self.speculate + 1))
        chunks, rows = layout.chunks(0, target.layers), target.row_layers()
        held = [{layer for stage, some in chunks if stage == each for layer in some} for each in range(layout.pp)]
        have = self.window_pages or self.pages
        for wrong, says in (
            (window > have, f"a sliding window needs {window} pages of {self.page_size} tokens for steps of"
             f" {max(self.chunk, self.speculate + 1)}, and its pool has {have}: raise --window-pages"),
            (self.back_end != "torch", "back end flashinfer runs no hybrid model: choose --back-end torch"),
            (self.host_pages and any(layers.isdisjoint(rows) for layers in held),
             "--host-pages needs a layer that attends to all tokens in each stage, as others may lack what is kept of a"
             " page: leave --pp out"),
            (layout.cp > 1, "tokens of a recurrent layer come one after the other, so that context-parallel ranks of"
             " prefill would wait for each other: leave --cp out"),
            (layout.dcp > 1 and self.framework != "torch",
             "tokens of a hybrid model are dealt over ranks of decode by torch only: leave --dcp out"),
        ):  # fmt: skip
            if wrong:
                raise EngineError(says)

    def kvproto(self) -> Options:
        """kvproto's options for the Source or Sink of a rank."""
        doors = "-{role}" if self.role else ""
        options = Options(
            transports=(self.transport,),
            measured=self.costs.measured if self.costs else (),
            verify=self.verify,
            pull=self.pull,
            spread=self.spread,
            cold_draft=self.cold_draft is not None,
            insecure=self.insecure,
            keys=self.keys,
            metrics=self.probes is not None,
            feed=self.folder / f"feed-{self.name}-{self.replica}-{{rank}}{doors}" if self.feed else None,
        )
        return options if self.part is None else attrs.evolve(options, part_bytes=self.part)

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's tokenizer; raises EngineError if the draft has another vocabulary."""
        return shared_tokenizer(*self.folders)


_COUNTS = (
    "dp", "tp", "pp", "virtual", "draft_tp", "cp", "dcp", "interleave", "pages", "page_size", "window_pages", "chunk",
    "sources",
)  # fmt: skip
"""Options that are at least 1."""


def parse(role: str, argv: list[str] | None) -> EngineOptions:
    """The options of `kvproto-prefill`, `kvproto-decode` or `kvproto-engine`; raises EngineError."""
    args = _parser(role).parse_args(argv)
    if args.part is not None and args.part < 1:
        raise EngineError(f"--part must be at least 1, not {args.part}")
    if args.speculate < 0:
        raise EngineError(f"--speculate must be 0, for no draft, or more, not {args.speculate}")
    if (args.max_logprobs or 0) < 0:
        raise EngineError(f"--max-logprobs must be at least 0, not {args.max_logprobs}")
    if not 0 <= args.drain_for < float("inf"):
        raise EngineError(f"--drain-for must be seconds, 0 or more, not {args.drain_for}")
    for name in _COUNTS:
        if isinstance(given := vars(args).get(name), int) and given < 1:
            raise EngineError(f"--{name.replace('_', '-')} must be at least 1, not {given}")
    _check(role, args)
    sizes = {field.name: vars(args)[field.name] for field in attrs.fields(Layout)}
    layout = Layout(**{**sizes, "deal": _deal(args.deal)})
    layout.parallel.order("--")  # refuses a deal that is none
    devices = args.devices or ((0,) if args.transport == "cuda" else ())
    return EngineOptions(
        name=args.name,
        folder=private_folder(args.dir),
        layout=layout,
        replica=args.replica,
        pages=args.pages,
        page_size=args.page_size,
        window_pages=args.window_pages,
        address=_address(args),
        advertise=getattr(args, "advertise", None),
        target=checkpoint_folder("target", args.target),
        draft=draft_folder(args.draft, args.speculate, args.target),
        dtype=args.dtype,
        chunk=args.chunk,
        speculate=args.speculate,
        max_logprobs=args.max_logprobs,
        transport=args.transport,
        devices=devices,
        part=args.part,
        pull=args.pull,
        spread=args.spread,
        cold_draft=args.cold_draft,
        pools=args.pools,
        framework=args.framework,
        back_end=args.back_end,
        captured=vars(args).get("captured", False),
        costs=args.costs and load(args.costs),
        feed=args.feed,
        probes=args.probes,
        adapters=adapters_of(dict(args.adapter)),
        images=vars(args).get("images", False),
        quiet=vars(args).get("quiet", False),
        intent=vars(args).get("intent", False),
        spans=vars(args).get("spans", False),
        drain_for=args.drain_for,
        host_pages=args.host_pages,
        storage=args.storage,
        verify=not args.no_verify,
        insecure=args.insecure,
        keys=args.keys,
        role=vars(args).get("role", ""),
        seeds={} if role == "prefill" else _seeds(args),
        found=None if role == "prefill" else _found(args),
        register=etcd_of(args.register) if vars(args).get("register") else None,
        seed={"prefill": 1, "decode": 2, "engine": 3}[role],
    )


def _parser(role: str) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"kvproto-{role}", description=f"Reference {role} engine of kvproto (PyTorch or JAX)."
    )
    add = parser.add_argument
    add(
        "--dir",
        type=Path,
        required=True,
        help="private directory that both engines and the router use; created if missing",
    )
    add("--tp", type=int, default=1, help="tensor-parallel ranks of a replica (default 1)")
    add("--dp", type=int, default=1, metavar="N", help=DP)
    add_stages(parser)
    add("--cp", type=int, default=1, help="context-parallel ranks of prefill for each TP rank (default 1)")
    add("--replica", type=int, default=0, help="which data-parallel replica this is, from 0 (default 0)")
    add_dcp(parser)
    add_models(parser)
    place = "where rank 0 of the prefill engine listens (default: ipc in DIR)"
    add("--prefill", default=None, metavar="ADDRESS", help=place)
    add("--keys", type=Path, metavar="DIR", help="folder with this engine's keys, made by `kvproto keygen`; for TCP")
    add("--insecure", action="store_true", help="allow TCP without keys")
    add("--pages", type=int, default=160, help="pages in each pool (default 160)")
    add("--page-size", type=int, default=16, help="tokens per page (default 16)")
    add("--chunk", type=int, default=64, help="prompt tokens per prefill step (default 64)")
    add("--host-pages", type=int, default=0, metavar="N", help="keep up to N pages on the host for reuse")
    stores = "also store them: in a folder, packs:FOLDER or s3://BUCKET/PREFIX"
    add("--storage", metavar="PLACE", help=stores)
    part = "send computed rows early, once there are this many bytes (default 16 MiB)"
    add("--part", type=int, help=part)
    add_forms(parser)
    add("--speculate", type=int, default=4, help=SPECULATE)
    most = "let requests ask for log probabilities, with those of the N likeliest tokens at most; as the other engine"
    add("--max-logprobs", type=int, metavar="N", help=most)
    add_spread(parser)
    add_adapters(parser)
    add("--no-verify", action="store_true", help="do not offer feature VERIFY")
    add("--transport", default="shm", metavar="NAME", help=TRANSPORT_HELP)
    gpus = "GPUs of the ranks (default 0 with --transport cuda, otherwise the host)"
    add("--devices", type=numbers, default=(), metavar="N,N,...", help=gpus)
    add("--pools", choices=POOLS, default="own", help="who allocates the pools: kvproto, or JAX with --transport cuda")
    add("--framework", choices=FRAMEWORKS, default="torch", help="framework that computes (default torch)")
    add_back_end(parser)
    add("--pull", action="store_true", help="offer feature PULL: if both engines do, decode reads what prefill offers")
    cold = "let the draft begin with zero rows, or compute them, where prefill lacks it; prefill has to allow it too"
    add("--cold-draft", choices=COLD, nargs="?", const=COLD[0], help=cold)
    drain = "seconds after SIGTERM in which requests under way may finish; 0: end at once (default 30)"
    add("--drain-for", type=float, default=30.0, metavar="SECONDS", help=drain)
    add("--feed", action="store_true", help="open feeds for `kvproto top DIR/feed-*` and `kvproto tail`")
    add("--probes", metavar="HOST:PORT", help="answer /ready, /live, /metrics and /drain here, by HTTP (rank 0)")
    add("--costs", type=Path, metavar="FILE", help="results of `kvproto probe`, which say what runs are long")
    add("--name", default=role, help=f"name of this engine (default {role})")
    if role == "prefill":
        place = (
            "where decode reaches rank 0, if not at --prefill: behind NAT, or if that is a wildcard; with {replica} if"
        )
        place += " replicas have hosts of their own, and so the same ports"
        add("--advertise", metavar="ADDRESS", help=place)
        add("--register", metavar="etcd:URL", help="keep a row of this engine there, which `--sources` of decode reads")
        add(
            "--images", action="store_true", help="take prompts with images, whose rows come from kvproto-encode in DIR"
        )
    if role == "engine":
        _add_peers(parser)
    if role == "decode":
        _add_sources(parser)
        add_captured(parser)
    return parser


def _add_peers(parser: argparse.ArgumentParser) -> None:
    """Add the options of engines that can do both."""
    add = parser.add_argument
    text = "kind of requests that it takes at first; the router may change it (default both)"
    add("--role", choices=ROLES, default="both", help=text)
    engines = "engines in all, --replica 0 to N-1, each of which fetches from the others (default 1)"
    add("--sources", type=int, default=1, metavar="N", help=engines)
    key = "public.key of the engines, which is the same for all; for TCP"
    add("--source-key", type=Path, metavar="FILE", help=key)
    add("--quiet", action="store_true", help="do not report sources that come and go: the router does")


def _add_sources(parser: argparse.ArgumentParser) -> None:
    """Add the options of decode that say where prefill is, and how its pages are claimed."""
    add = parser.add_argument
    add("--source", default="prefill", metavar="NAME", help="name of the prefill engine (default prefill)")
    add("--intent", action="store_true", help="claim pages after prefill, not when a request arrives (INTENT)")
    add("--spans", action="store_true", help="claim them piece by piece while prefill runs (SPANS)")
    add("--source-key", type=Path, metavar="FILE", help="public.key of the prefill engine; for TCP")
    sources = "replicas of the prefill engine (default 1); or their directory, which replaces --prefill and --source"
    add("--sources", type=_sources, default=1, metavar="N|dns:ENGINE=HOST:PORT|etcd:URL", help=sources)
    add("--source-keys", type=Path, metavar="FILE", help="public keys of the sources in a directory, one a line")
    seeds = "sources.toml, which says where all replicas listen and which keys they have; replaces the five above"
    add("--seeds", type=Path, metavar="FILE", help=seeds)
    add("--quiet", action="store_true", help="do not report sources that come and go: the router does")


def _address(args: argparse.Namespace) -> str:
    return args.prefill or f"ipc://{args.dir.absolute() / 'kv'}"


def _seeds(args: argparse.Namespace) -> dict[tuple[str, int], Seed]:
    """The sources of decode, from the file of --seeds or from the other options."""
    key = _key(args.source_key)
    if vars(args).get("role"):
        others = (n for n in range(args.sources) if n != args.replica)
        return {(args.name, n): Seed(rank_address(_address(args), n, 0), key) for n in others}
    if args.seeds is not None:
        found = read_sources(args.seeds, args.insecure)
        if not found:
            raise EngineError(f"--seeds {args.seeds} lists no source: add one as [[source]]")
        return found
    if isinstance(args.sources, str):
        return {}
    return {(args.source, n): Seed(rank_address(_address(args), n, 0), key) for n in range(args.sources)}


def _found(args: argparse.Namespace) -> FoundSources | None:
    """The sources that a directory names; raises LocalError."""
    if vars(args).get("role"):
        return None
    if not isinstance(args.sources, str) or args.seeds is not None:
        return None
    return read_found(args.sources, args.source_keys or args.source_key)


def _sources(text: str) -> int | str:
    """A number of replicas, or the name of a directory."""
    if text.startswith(SCHEMES):
        return text
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a number of replicas nor a directory: {' or '.join(SCHEMES)}..."
        )
    return int(text)


def unknown_hosts(seeds: Mapping[tuple[str, int], Seed]) -> dict[str, str]:
    """Hosts that this machine cannot resolve, each with the reason; it may when they are dialled."""
    found = {}
    for address in {seed.address for seed in seeds.values() if seed.address.startswith("tcp://")}:
        try:
            socket.getaddrinfo(address.removeprefix("tcp://").rpartition(":")[0].strip("[]"), None)
        except OSError as error:
            found[address] = str(error.strerror)
    return found


def _key(path: Path | None) -> str | None:
    """The public key in a file, or None without a file; raises EngineError."""
    try:
        return path.read_text().strip() if path is not None else None
    except (OSError, ValueError) as error:
        raise EngineError(f"--source-key {path} holds no public key: {error}") from None


def _deal(text: str) -> str | tuple[int, ...]:
    """The name of a deal, or the rank of each of its runs; raises EngineError."""
    if not text[:1].isdecimal():
        return text
    try:
        return numbers(text)
    except ValueError:
        raise EngineError(f"--deal is a name, or ranks with commas between, not {text}") from None


def _check(role: str, args: argparse.Namespace) -> None:
    """Raise EngineError for options that cannot be combined."""
    gpus, jax = bool(args.devices) or args.transport == "cuda", args.framework != "torch"
    flashinfer, captured = args.back_end == "flashinfer", vars(args).get("captured", False)
    missing = {name for name in ("jax", "flashinfer") if importlib.util.find_spec(name) is None}
    kept = args.host_pages
    ranks, devices = args.tp * args.cp * args.pp, args.devices or (0,)
    shared = len(set(devices[:ranks])) < ranks
    own = f"a GPU for each of the {ranks} ranks, by --devices"
    refused = (
        (args.pools == "jax" and args.transport != "cuda",
         "--pools jax needs --transport cuda: elsewhere only kvproto's own memory is shared"),
        (args.pull and args.transport in ("nixl", "inline"),
         "--pull needs --transport shm or cuda: over nixl and inline prefill sends"),
        (jax and gpus and len(set(devices[:ranks])) < ranks,
         f"--framework jax needs a GPU for each of its {ranks} ranks, --devices names {','.join(map(str, devices))}"),
        (jax and args.pools != "own", "--pools is torch's: --framework jax computes in memory of kvproto's"),
        (jax and flashinfer, "--back-end is torch's: --framework jax has attention of its own"),
        ((args.draft == "none" or not args.speculate) and (args.draft_tp or vars(args).get("draft_sharded")),
         "--draft-tp and --draft-sharded are of a draft: leave them out, or give one by --draft and --speculate"),
        (args.virtual > 1 and args.pp == 1, "--virtual is chunks of each pipeline stage: it needs --pp above 1"),
        (jax and "jax" in missing, f"--framework {args.framework} needs JAX: pip install jax"),
        (args.framework == "jax.distributed" and (args.pp > 1 or args.draft_tp),
         "--framework jax.distributed has no stages, and the draft on all ranks: choose --framework jax, which has all"
         " ranks in one process"),
        (args.devices and args.transport in ("shm", "inline"),
         "--devices needs --transport cuda or nixl: shm and inline move memory of the host"),
        (not 0 <= args.replica <= REPLICAS - args.dp,
         f"--replica must be 0 to {REPLICAS - args.dp}, not {args.replica}"),
        (jax and vars(args).get("images"), "--images is torch's: choose --framework torch"),
        (vars(args).get("images") and kept, "--host-pages finds pages by tokens, not by images: leave one of them out"),
        (vars(args).get("images") and gpus,
         "--images takes rows in memory of the host: choose --transport shm or inline, without --devices"),
        (jax and args.adapter, "--adapter is torch's: --framework jax computes all requests with the target alone"),
        (captured and args.adapter,
         "a CUDA graph computes all tokens alike, with or without adapters: leave --captured or --adapter out"),
        (len(dict(args.adapter)) < len(args.adapter), "--adapter names each adapter once"),
        (jax and args.dp > 1, "--dp is torch's: --framework jax has the experts of one replica"),
        (args.dp > 1 and captured, "--captured is of ranks alone: experts of other replicas are in no CUDA graph"),
        (role == "decode" and args.cp > 1, "--cp is prefill's; ranks of decode deal tokens by --dcp"),
        (flashinfer and not gpus,
         "--back-end flashinfer runs on CUDA: it needs --transport cuda, or nixl with --devices"),
        (flashinfer and args.dtype == "float32", "--back-end flashinfer needs --dtype bfloat16 or float16"),
        (flashinfer and args.cp > 1, "--cp attends by back end torch alone, not by flashinfer"),
        (flashinfer and "flashinfer" in missing,
         "--back-end flashinfer needs FlashInfer: pip install 'kvproto-reference[flashinfer]'"),
        (args.storage and not kept, "--storage needs --host-pages: pages go there from the host"),
        (kept < 0, f"--host-pages must be at least 0, not {kept}"),
        (kept and args.window_pages,
         "--host-pages keeps the pages of sliding windows with the others: leave --window-pages out"),
        (kept and gpus, "--host-pages is of pools on the host: those of a GPU are not kept yet"),
        (kept and (vars(args).get("intent") or vars(args).get("spans")),
         "--host-pages takes all pages of a request at once: leave --intent and --spans out"),
        (kept and (args.kv_dtype != MODEL or args.kv_converts),
         "--host-pages keeps rows as the model is: leave --kv-dtype and --kv-converts out"),
        (jax and args.kv_dtype != MODEL,
         "--kv-dtype is torch's: --framework jax stores rows as the model is, which --kv-converts allows to convert"),
        (flashinfer and args.kv_dtype != MODEL, "--kv-dtype is of --back-end torch: leave one of them out"),
        (captured and (jax or not gpus),
         "--captured is of torch on GPUs: it needs --transport cuda, or nixl with --devices, and no --framework jax"),
        (captured and shared, f"--captured needs {own}: ranks that share one add up over gloo, which no graph holds"),
        (captured and (args.pp > 1 or args.draft_tp),
         "--captured needs all layers on every rank: leave --pp and --draft-tp out"),
        (args.exchange in ON_CUDA and (jax or not gpus or shared), f"--exchange {args.exchange} needs torch and {own}"),
    )  # fmt: skip
    for wrong, says in refused:
        if wrong:
            raise EngineError(says)


def add_back_end(parser: argparse.ArgumentParser) -> None:
    """Add the option that chooses torch's attention; the demo has the same for both engines."""
    text = "what computes attention in torch; flashinfer: on GPUs with --dtype bfloat16 or float16 (default torch)"
    parser.add_argument("--back-end", choices=KERNELS, default="torch", help=text)


def add_captured(parser: argparse.ArgumentParser) -> None:
    """Add the option of CUDA graphs; the demo has the same as its decode engine."""
    text = "run decode steps of one token as CUDA graphs; needs a GPU for each rank"
    parser.add_argument("--captured", action="store_true", help=text)


STAGES = {
    "pp": (1, "pipeline stages that share the target's layers; the draft is on the last (default 1)"),
    "virtual": (1, "chunks of layers per stage: chunk i is on stage i mod pp (default 1)"),
    "draft-tp": (None, "hold the draft on only the first N ranks of the last stage (default: all)"),
}
"""Defaults and help texts of the options of pipeline stages and of the draft's place, by name."""


def add_stages(parser: argparse.ArgumentParser, role: str = "") -> None:
    """Add those options; the demo has them for either engine, whose role and "-" come before the name."""
    for name, (default, text) in STAGES.items():
        parser.add_argument(f"--{role}{name}", type=int, default=default, metavar="N", help=text)


def add_dcp(parser: argparse.ArgumentParser) -> None:
    """Add the options of decode context parallelism; the demo has the same as its decode engine."""
    add = parser.add_argument
    add("--dcp", type=int, default=1, help="TP ranks that deal the target's tokens among themselves (default 1)")
    add("--interleave", type=int, default=1, help="consecutive tokens that one DCP rank stores (default 1)")
    add("--deal", default="cyclic", metavar="NAME|R,R,...", help=DEAL)
    add("--draft-sharded", action="store_true", help="deal the draft's tokens too; otherwise each rank stores all")
    how = "how DCP ranks merge attention; a2a_packed and peer: in 16 bits, with a GPU for each rank (default a2a)"
    add("--exchange", choices=EXCHANGES, default="a2a", help=how)
    add("--replicate-q", action="store_true", help="project a DCP group's queries on every rank; gather none")


def add_models(parser: argparse.ArgumentParser) -> None:
    """Add the options that choose target and draft; the demo has the same as its engines."""
    text = "pages in the pool of a hybrid's sliding windows, which are used again as they move (default: as --pages)"
    parser.add_argument("--window-pages", type=int, metavar="N", help=text)
    for role, alias, default in (("target", "--model", "mla"), ("draft", "--draft-model", "gqa")):
        others = ", eagle or mtp for a head of the target, or none" if role == "draft" else ""
        names = f"{', '.join(SHIPPED[role])}, or a checkpoint folder, kvproto's or Hugging Face's{others}"
        text = f"{names} (default {default})"
        parser.add_argument(f"--{role}", alias, dest=role, metavar="DIR", default=default, help=text)
    parser.add_argument(
        "--dtype",
        choices=["float32", "bfloat16", "float16", "auto"],
        default="float32",
        help="element type of weights and caches; auto: as each config.json says (default float32)",
    )


def add_forms(parser: argparse.ArgumentParser) -> None:
    """Add the options of the form of stored rows."""
    parser.add_argument("--kv-dtype", choices=FORMS, default=MODEL, help=KV_DTYPE)
    converts = "FP8 forms of the other engine's rows, into and from which these may be converted (feature CONVERT)"
    parser.add_argument("--kv-converts", type=_names, default=(), metavar="NAME,...", help=converts)


def add_role_forms(parser: argparse.ArgumentParser) -> None:
    """Add those of the demo, one for each engine."""
    for role in ("prefill", "decode"):
        text = f"the {role} engine's {KV_DTYPE}"
        parser.add_argument(f"--{role}-kv-dtype", choices=FORMS, default=MODEL, help=text)


def add_spread(parser: argparse.ArgumentParser) -> None:
    """Add `--spread`; the demo has the same as its engines."""
    text = "which prefill ranks send what several have: even, few or one, the same in both engines (default even)"
    parser.add_argument("--spread", choices=("even", "few", "one"), default="even", help=text)


def add_adapters(parser: argparse.ArgumentParser) -> None:
    """Add `--adapter`; the demo has the same as its engines."""
    text = "load a LoRA adapter of the target, in PEFT's form, that requests may name; may be given several times"
    parser.add_argument("--adapter", type=_adapter, action="append", default=[], metavar="NAME=DIR", help=text)


def _adapter(text: str) -> tuple[str, Path]:
    name, _, folder = text.partition("=")
    if not name or not folder:
        raise argparse.ArgumentTypeError(f"NAME=DIR is needed, not {text}")
    return name, Path(folder)


def draft_folder(name: str, speculate: int, target: str) -> Path | None:
    """The folder of a draft; None for "none", and where nothing is to be proposed.

    "eagle" and "mtp" are the heads that were trained for a shipped target or for SmolLM2; raises EngineError for
    another target.
    """
    if name == "none" or not speculate:
        return None
    form = HEADS.get(name)
    return checkpoint_folder("draft", name) if form is None else shipped_head(form, checkpoint_folder("target", target))


def checkpoint_folder(role: str, name: str) -> Path:
    """The folder of a shipped checkpoint, or else `name` itself as a folder."""
    return CHECKPOINTS / f"{role}-{name}" if name in SHIPPED[role] else Path(name)


def private_folder(folder: Path) -> Path:
    """The absolute path of the directory, made with mode 0700 if missing; raises EngineError if others may enter it."""
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        mode = folder.stat().st_mode & 0o777
    except OSError as error:
        raise EngineError(f"--dir {folder} is no directory for sockets: {error.strerror}; choose another") from error
    if mode & 0o077:
        raise EngineError(f"--dir {folder} has mode {mode:04o}, and needs mode 0700: chmod 700 {folder}")
    return folder.absolute()


def rank_address(address: str, replica: int, rank: int) -> str:
    """The address of a rank of a prefill replica: an ipc address with both appended, or a TCP port further on.

    With "{replica}" in a TCP address each replica has a host of its own, and only ranks have ports further on.
    """
    if address.startswith("tcp://"):
        if "{replica}" in address:
            address, replica = address.replace("{replica}", str(replica)), 0
        host, _, port = address.rpartition(":")
        if not port.isdigit() or not 0 < (moved := int(port) + PORTS * replica + rank) < 65536:
            raise EngineError(f"--prefill and --advertise are ipc addresses or tcp://HOST:PORT, not {address}")
        return f"{host}:{moved}"
    return f"{address}-{replica}-{rank}"
