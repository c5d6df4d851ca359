"""A prefill process on a GPU, for tests: ADDRESS DEVICE SEED KEY; lines on stdin say what to do.

part: the target's first layer is computed. finish: all is. fault: a kernel writes where there is no memory, then all is.
It ends with status 3 at a DeviceFault.
"""

import select
import sys

import numpy as np
from cuda.core import LaunchConfig, Program, ProgramOptions, launch

from kvproto.errors import DeviceFault
from kvproto.source.prefill import Computed
from kvproto.transport.cuda.driver import call, current, driver
from kvproto.wire.messages import Ticket
from tests.gpu.nodes import CONTENT, FINISHED, HERE, TOKENS, filled, source

_FAULT = 'extern "C" __global__ void fault() { *(volatile int*)8 = 1; }'


def fault(device: int) -> int:
    """Lose the context; the handle of an event after that."""
    gpu = current(device)
    arch = "".join(map(str, gpu.compute_capability))
    stream = gpu.create_stream()
    event = call(driver.cuEventCreate(0), "event")
    launch(
        stream,
        LaunchConfig(grid=1, block=1),
        Program(_FAULT, "c++", ProgramOptions(arch=f"sm_{arch}")).compile("cubin").get_kernel("fault"),
    )
    driver.cuEventRecord(event, stream.handle)
    driver.cuStreamSynchronize(stream.handle)
    return int(event)


def main() -> int:
    address, device, seed, key = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), bytes.fromhex(sys.argv[4])
    pool, _ = filled(device, seed)
    node = source(address, pool)
    node.expect(Ticket(key=key, engine="p", replica=0, deadline=60_000), CONTENT, TOKENS)
    print("listening", flush=True)
    try:
        while True:
            node.turn()
            if not select.select([sys.stdin], [], [], 0.002)[0]:
                continue
            match sys.stdin.readline().strip():
                case "part":
                    node.computed(key, Computed({0: np.array(HERE)}, TOKENS, (0, 1)))
                case "finish":
                    node.finish(key, FINISHED)
                case "fault":
                    fault(device)
                    node.finish(key, FINISHED)
                case _:
                    return 0
    except DeviceFault as error:
        print(f"fault: {error}", file=sys.stderr, flush=True)
        return 3


if __name__ == "__main__":
    sys.exit(main())
