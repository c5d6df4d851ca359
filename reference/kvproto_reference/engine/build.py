"""Puts a torch model, its pool and its attention together on one rank."""

from pathlib import Path

from .. import checkpoint
from ..attention.exchange import EXCHANGES, Alone
from ..attention.paged import PagedAttention
from ..attention.torch_kernel import TorchKernel
from ..cache import KVPool, Shard
from ..models import SOLO, TensorParallel, kv_head_of
from .runner import TorchRunner


def torch_runner(
    folder: Path,
    pool: KVPool,
    shard: Shard,
    place: TensorParallel = SOLO,
    exchange: str = "a2a",
    by_token: bool = False,
) -> TorchRunner:
    """A runner of the model in a checkpoint folder; `exchange` is how DCP ranks merge, see EXCHANGES.

    The process group of the DCP ranks is `place.dcp_group`. `by_token`: see `PagedAttention`.
    """
    config, heads = pool.config, pool.config.heads
    model = checkpoint.load(folder, place, dtype=config.dtype, device=pool.device)
    among = place.together if place.dcp > 1 else place
    kernel = TorchKernel(
        pool, kv_head_of(config, place, among.share(heads)), kv_head_of(config, place, place.share(heads))
    )
    merging = Alone() if place.dcp == 1 else EXCHANGES[exchange](place.dcp, place.dcp_group, place.replicate_q)
    return TorchRunner(model, PagedAttention(pool, kernel, merging, by_token), shard)
