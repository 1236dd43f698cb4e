"""Work that ends when the client that asked for it disconnects."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from fastapi import Request

from service.control.errors import Unavailable

Result = TypeVar("Result")


async def unless_disconnected(request: Request, work: Coroutine[Any, Any, Result]) -> Result:
    """Result of `work`, which is cancelled if the client disconnects. The request's body must have been read."""
    work_task, disconnect_task = asyncio.ensure_future(work), asyncio.ensure_future(_wait_for_disconnect(request))
    try:
        await asyncio.wait({work_task, disconnect_task}, return_when=asyncio.FIRST_COMPLETED)
        if not work_task.done():
            raise Unavailable("the client disconnected")
        return work_task.result()
    finally:
        disconnect_task.cancel()
        work_task.cancel()
        await asyncio.gather(work_task, disconnect_task, return_exceptions=True)


async def _wait_for_disconnect(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
