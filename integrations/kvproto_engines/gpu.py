"""Events after which pages on a GPU are written: nothing here waits for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

__all__ = ["Gpu"]


class Gpu:
    """The GPU of an engine's pages; without one, what was computed is there."""

    def __init__(self, device: torch.device, forward: Any = None) -> None:
        """`forward` is the stream in which forwards run; None: the current one."""
        self._device = device if device.type == "cuda" else None
        self._forward = forward

    def written(self, event: Any = None) -> Any:
        """After this event the pages hold what SGLang says: the `event` that it gave, or what is queued now."""
        if self._device is None or event is not None:
            return event if self._device is not None else None
        return torch.cuda.current_stream(self._device).record_event()

    def idle(self) -> Callable[[], bool]:
        """Whether what was queued by now, and may write pages of requests that are over, is done."""
        if self._device is None:
            return lambda: True
        events = [torch.cuda.current_stream(self._device).record_event()]
        if self._forward is not None:
            events.append(self._forward.record_event())
        return lambda: all(event.query() for event in events)
