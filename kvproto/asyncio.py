"""Run a Source or Sink in an asyncio event loop: `drive` steps it there, and `wait` awaits one of its handles.

    async with drive(Sink("decode", pool, sources, Options(thread=False))) as sink:
        arrived = await wait(sink.fetch(ticket, prompt, pages))

`wait` also works with a Source or Sink that has an I/O thread.
"""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypeVar

from kvproto.errors import LocalError, check_type
from kvproto.rank.base import EngineRank
from kvproto.rank.handles import Handle
from kvproto.wire.enums import ErrorCode

__all__ = ["drive", "wait"]

AnyRank = TypeVar("AnyRank", bound=EngineRank)
Result = TypeVar("Result")


@asynccontextmanager
async def drive(rank: AnyRank) -> AsyncIterator[AnyRank]:
    """Step a Source or Sink from the running loop, and close it when the block ends.

    Open it with Options(thread=False). Its events are kept for `rank.events()`. An error that `step` raises ends all
    handles, and is raised when the block ends. Raises LocalError: OUT_OF_RANGE for any other object, UNEXPECTED_MESSAGE
    for a Source or Sink that has an I/O thread.
    """
    check_type("rank", rank, EngineRank, "a Source or a Sink")
    if rank.options.thread:
        advice = "pass Options(thread=False), or leave `drive` out"
        raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, "drive", "no I/O thread", f"{rank._who} has one", advice)
    loop = asyncio.get_running_loop()
    failures: list[BaseException] = []
    timer: asyncio.TimerHandle | None = None

    def turn() -> None:
        nonlocal timer
        if timer is not None:
            timer.cancel()
            timer = None
        try:
            rank._driver.step()
            planned = rank.next_timer()
        except BaseException as error:  # every handle has ended with it as well
            failures.append(error)
            return
        if planned is not None:
            timer = loop.call_later(planned, turn)

    fd = rank.fileno()
    loop.add_reader(fd, turn)
    turn()
    try:
        yield rank
    finally:
        loop.remove_reader(fd)
        if timer is not None:
            timer.cancel()
        rank.close()
    if failures:
        raise failures[0]


async def wait(handle: Handle[Result]) -> Result:
    """Wait until a handle has ended; return its event or raise its error. Cancelling the wait aborts no request.

    Raises LocalError: OUT_OF_RANGE for any other object, and UNEXPECTED_MESSAGE if its Source or Sink has no I/O
    thread and nothing has stepped it for a second after it was opened.
    """
    check_type("handle", handle, Handle, "a handle, such as `fetch` and `request` return")
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[None] = loop.create_future()

    def end() -> None:
        if not ended.done():
            ended.set_result(None)

    def tell(_: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, so nothing waits in it any more
            loop.call_soon_threadsafe(end)

    handle.add_done_callback(tell)
    rank = handle._rank
    if not rank.options.thread and not rank._driver.stepped:
        await asyncio.wait([ended], timeout=_IDLE)
        if not handle.done and not rank._driver.stepped:
            advice = "use kvproto.asyncio.drive, call step, or open it without Options(thread=False)"
            mine, yours = "something that steps it, as it has no I/O thread", "nothing"
            raise LocalError(ErrorCode.UNEXPECTED_MESSAGE, rank._who, mine, yours, advice)
    await ended
    return handle.wait(0)


_IDLE = 1.0
"""Seconds after which a Source or Sink that was never stepped counts as one that nothing drives."""
