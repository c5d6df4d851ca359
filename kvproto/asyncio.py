"""A Source or Sink in an asyncio loop: `drive` gives it its turns there, `wait` awaits a handle.

    async with drive(Sink("decode", pool, sources, Options(thread=False))) as sink:
        arrived = await wait(sink.fetch(ticket, prompt, pages))

`wait` works as well with a Source or Sink that has an I/O thread.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from kvproto.door import Door, Handle

__all__ = ["drive", "wait"]

AnyDoor = TypeVar("AnyDoor", bound=Door)
Result = TypeVar("Result")


@asynccontextmanager
async def drive(door: AnyDoor) -> AsyncIterator[AnyDoor]:
    """Give a Source or Sink its turns in the running loop, then close it; raises what `step` raises.

    Open it with Options(thread=False). Its events are kept for `door.events()`.
    """
    loop = asyncio.get_running_loop()
    failures: list[BaseException] = []
    timer: asyncio.TimerHandle | None = None

    def turn() -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
            timer = None
        try:
            door._driver.step()
            planned = door.next_timer()
        except BaseException as error:  # handles have it too
            failures.append(error)
            return
        if planned is not None:
            timer = loop.call_later(planned, turn)

    fd = door.fileno()
    loop.add_reader(fd, turn)
    turn()
    try:
        yield door
    finally:
        loop.remove_reader(fd)
        if timer is not None:
            timer.cancel()
        door.close()
    if failures:
        raise failures[0]


async def wait(handle: Handle[Result]) -> Result:
    """The event that ends a handle; raises the error where it fails. Cancelling it leaves the request as it is."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def tell(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop was closed: nobody waits there any more
            loop.call_soon_threadsafe(end)

    handle.add_done_callback(tell)
    await ended
    return handle.wait(0)
