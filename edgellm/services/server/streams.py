"""Several tasks of one stream."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def first_of(*works: Coroutine[Any, Any, Any]) -> None:
    """Run all until one of them ends, and cancel the others. Raise the error of the one that ended."""
    tasks = [asyncio.ensure_future(work) for work in works]
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
