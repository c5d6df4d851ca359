"""A process with a region on a GPU, for tests: LENGTH DEVICE; it prints its Region, then does what lines of JSON say."""

import json
import sys

import numpy as np

from kvproto.transport.bench import scattered
from kvproto.transport.cuda.copier import Copier
from kvproto.transport.cuda.kernel import CopyJob
from kvproto.transport.cuda.memory import DeviceMemory, connect
from kvproto.wire import decode_struct, encode_struct
from kvproto.wire.messages import Region
from tests.gpu.memory import put

KEEP = []


def pool(length: int, device: int, whose: str) -> DeviceMemory:
    """Our own memory, or a framework's."""
    if whose == "jax":
        import jax

        made = jax.device_put(np.zeros(length, np.uint8), jax.devices()[device]).block_until_ready()
        KEEP.append(made)
        return DeviceMemory.adopt(made.unsafe_buffer_pointer(), length)
    if whose == "torch":
        import torch

        made = torch.zeros(length, dtype=torch.uint8, device=f"cuda:{device}")
        torch.cuda.synchronize(device)
        KEEP.append(made)
        return DeviceMemory.adopt(made.data_ptr(), length)
    return DeviceMemory(length, device)


def main() -> None:
    length, device = int(sys.argv[1]), int(sys.argv[2])
    mine = pool(length, device, sys.argv[3])
    print(encode_struct(mine.region).hex(), flush=True)
    for line in sys.stdin:
        what = json.loads(line)
        if "fill" in what:
            put(mine, np.random.default_rng(what["fill"]).integers(0, 256, length, np.uint8))
            print("filled", flush=True)
        if "torch" in what:
            import torch

            data = np.random.default_rng(what["torch"]).integers(0, 256, length, np.uint8)
            torch.from_dlpack(mine).view(torch.uint8).copy_(torch.from_numpy(data))
            torch.cuda.synchronize(device)
            print("written", flush=True)
        if "inside" in what:
            part = DeviceMemory.adopt(mine.address + what["inside"], length - what["inside"], id=1)
            print(encode_struct(part.region).hex(), flush=True)
        if "write" in what:
            theirs = connect(decode_struct(Region, bytes.fromhex(what["write"])), "regions[0]", device)
            put(mine, np.random.default_rng(1).integers(1, 256, length, np.uint8))
            copier = Copier(device, slots=64)
            programs = [scattered(256, length // 256, seed=s) for s in range(8)]
            prepared = [copier.prepare(p, {0: mine.address}, {0: theirs.address}) for p in programs]
            print("writing", flush=True)
            while True:
                for p, made in zip(programs, prepared, strict=True):
                    copies = [copier.submit([CopyJob(made, p.maps)]) for _ in range(8)]
                copies[-1].wait()


if __name__ == "__main__":
    main()
