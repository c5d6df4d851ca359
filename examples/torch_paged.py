"""A paged torch engine with one tensor per layer in HND, whose tensors become the pool as they are.

`python examples/torch_paged.py [--apart] [--device N]`. Joint: one tensor per layer, [2, page, head, token, dim].
Apart: separate tensors for K and V. On the host the engine's memory comes from `kvproto.allocate`, because other
processes must be able to map it; GPU memory is used as torch allocates it.
"""

from __future__ import annotations

import argparse
import tempfile
from math import prod
from typing import Any

import torch
import torch.utils.dlpack

from kvproto import Cache, DType, Pool, Prompt, Sink, Source, allocate, lay_out, new_ticket

LAYERS, HEADS, DIM, PAGE, PAGES = 4, 2, 16, 16, 24


def zeros(shape: tuple[int, ...], device: int | None) -> torch.Tensor:
    """A tensor of the cache: on the host, the last line is all that differs from `torch.zeros`."""
    if device is not None:
        return torch.zeros(shape, dtype=torch.bfloat16, device=f"cuda:{device}")
    return torch.utils.dlpack.from_dlpack(allocate(2 * prod(shape))).view(torch.bfloat16).view(shape)


class Engine:
    """The cache of an engine: k[layer] and v[layer] are [page, head, token, dim], joint in memory or apart."""

    def __init__(self, apart: bool, device: int | None) -> None:
        shape = (PAGES, HEADS, PAGE, DIM)
        if apart:
            self.k, self.v = ([zeros(shape, device) for _ in range(LAYERS)] for _ in "kv")
            self.cache: Any = {"k": self.k, "v": self.v}
            self.axes = "page head token dim"
        else:
            self.cache = [zeros((2, *shape), device) for _ in range(LAYERS)]
            self.k, self.v = ([joint[part] for joint in self.cache] for part in (0, 1))
            self.axes = "part page head token dim"

    def write(self, pages: list[int], keys: torch.Tensor, values: torch.Tensor) -> None:
        """Put K and V, [layer, token, head, dim], into the pages."""
        at, row = torch.tensor(pages)[torch.arange(keys.shape[1]) // PAGE], torch.arange(keys.shape[1]) % PAGE
        for layer in range(LAYERS):
            self.k[layer][at, :, row], self.v[layer][at, :, row] = keys[layer], values[layer]

    def read(self, pages: list[int], tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of the first tokens, [layer, token, head, dim]."""
        at, row = torch.tensor(pages)[torch.arange(tokens) // PAGE], torch.arange(tokens) % PAGE
        return torch.stack([k[at, :, row] for k in self.k]), torch.stack([v[at, :, row] for v in self.v])


def main() -> None:
    """Hand one request over, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--apart", action="store_true", help="separate tensors for K and V")
    parser.add_argument("--device", type=int, help="a GPU number (default: host memory)")
    args = parser.parse_args()
    cache = Cache.gqa("kv", LAYERS, kv_heads=HEADS, head_dim=DIM, page=PAGE, dtype=DType.BF16)
    # what no shape shows: engines that state another revision refuse each other
    geometry = lay_out([cache], facts={"weights.target": "example, revision 1"})
    prefill, decode = Engine(args.apart, args.device), Engine(not args.apart, args.device)  # the two need not be alike
    address = f"ipc://{tempfile.mkdtemp()}/prefill"
    with (
        Source("prefill", Pool(geometry, {"kv": prefill.cache}, axes=prefill.axes), address) as source,
        Sink("decode", Pool(geometry, {"kv": decode.cache}, axes=decode.axes), {"prefill": address}) as sink,
    ):
        prompt, ticket = Prompt(torch.arange(70)), new_ticket("prefill")
        request, fetch = source.request(ticket, prompt), sink.fetch(ticket, prompt, {"kv": [9, 3, 20, 11, 0]})
        keys, values = torch.randn(2, LAYERS, len(prompt), HEADS, DIM, device=prefill.k[0].device).bfloat16()
        prefill.write([4, 5, 6, 7, 8], keys, values)
        # an engine would pass after=event.cuda_event, so that nothing here waits for the device
        if args.device is not None:
            torch.cuda.synchronize(args.device)
        request.finish({"kv": [4, 5, 6, 7, 8]})
        arrived = fetch.wait(60)
        held = decode.read([9, 3, 20, 11, 0], len(prompt))
        assert torch.equal(held[0], keys)
        assert torch.equal(held[1], values)
        print(f"{sum(arrived.bytes.values())} bytes, equal")


if __name__ == "__main__":
    main()
