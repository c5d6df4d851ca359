"""Device events that complete when a test says so."""

import ctypes

from kvproto.transport.cuda.driver import call, current, driver

_GEQ = driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ.value
_APART = driver.CUstream_flags.CU_STREAM_NON_BLOCKING.value


class Gate:
    """An event behind a wait of its stream for a word of host memory."""

    def __init__(self, device: int) -> None:
        current(device)
        self._word = int(call(driver.cuMemHostAlloc(4096, 0), "pinned memory"))
        ctypes.memset(self._word, 0, 4096)
        stream = call(driver.cuStreamCreate(_APART), "stream")
        call(driver.cuStreamWaitValue32(stream, self._word, 1, _GEQ), "wait")
        self._event = call(driver.cuEventCreate(0), "event")
        call(driver.cuEventRecord(self._event, stream), "record")

    @property
    def handle(self) -> int:
        """The event, for `after`."""
        return int(self._event)

    def open(self) -> None:
        """Let the event complete."""
        ctypes.c_uint32.from_address(self._word).value = 1
