"""Slots for replies: in all, and by each model."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from edgellm.http.admission import Admission
from edgellm.http.schemas.errors import ApiError


def run(walk: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(walk(), 60))


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def test_whoever_waits_for_a_model_and_leaves_is_forgotten() -> None:
    async def walk() -> None:
        admission = Admission(2, 1)
        await admission.acquire("small", 1)
        waits = asyncio.create_task(admission.acquire("small", 1))
        await settled()
        with pytest.raises(ApiError, match="queue is full"):
            await admission.acquire("small", 1)
        waits.cancel()
        await settled()
        assert admission.waiting == 0
        admission.release("small")
        assert admission.running == 0
        await admission.acquire("small", 1)

    run(walk)


def test_a_slot_that_is_given_just_when_its_request_leaves_goes_to_the_next() -> None:
    async def walk() -> None:
        admission = Admission(2, 2)
        await admission.acquire("small", 1)
        leaves = asyncio.create_task(admission.acquire("small", 1))
        stays = asyncio.create_task(admission.acquire("small", 1))
        await settled()
        admission.release("small")
        leaves.cancel()
        await settled()
        assert (stays.done(), admission.running) == (True, 1)

    run(walk)
