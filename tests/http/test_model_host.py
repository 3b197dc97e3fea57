"""Models are opened on demand, one at a time, and closed when idle or for the memory of others; never while in use."""

import asyncio
import math
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edgellm.engine import ModelFile
from edgellm.errors import EngineFailed, InvalidOption, MemoryShort, ModelNotFound
from edgellm.http import model_host
from edgellm.http.model_host import ModelHost, ServedModel, beside_memory, keep_alive_seconds
from edgellm.http.schemas.errors import ApiError
from edgellm.http.schemas.responses import ModelInfo
from edgellm.llm import LLM
from edgellm.llm.model_loading import PairMemory

ROOM = 10


class Pair:
    """What the host knows of a pair."""

    context_length, draft_name = 64, None

    def __init__(self, size: int) -> None:
        self.memory = PairMemory(Counter(CPU=size), size)
        self.closed = False

    def close(self) -> None:
        self.closed = True


class Opening:
    """Opens a model of a size, if it fits into `ROOM`."""

    def __init__(self, name: str, size: int) -> None:
        self.name, self.size = name, size
        self.opened: list[Pair] = []
        self.may_open = threading.Event()
        self.may_open.set()
        self.error: Exception | None = None

    def file(self) -> ModelFile:
        raise ModelNotFound("There is no file.", "Ask for none.")

    def check_fits(self, beside: Counter[str]) -> None:
        if self.size + beside["CPU"] > ROOM:
            raise MemoryShort(f"{self.name} takes {self.size}.", "Close others.")

    def open(self, beside: Counter[str], is_closing: Callable[[], bool]) -> ServedModel:
        while not self.may_open.wait(0.01):
            assert not is_closing()
        if self.error is not None:
            raise self.error
        self.check_fits(beside)
        self.opened.append(Pair(self.size))
        return ServedModel(cast(LLM, self.opened[-1]), self.name)

    @property
    def in_memory(self) -> bool:
        return bool(self.opened) and not self.opened[-1].closed


class Shelf:
    """A catalogue: each model's name begins with its size."""

    def __init__(self) -> None:
        self.openings: dict[str, Opening] = {}

    def find(self, name: str) -> Opening:
        size = name.partition("-")[0]
        if not size.isdigit():
            raise ModelNotFound(f"No {name}.", "Ask for another.")
        return self.openings.setdefault(name, Opening(name, int(size)))

    def infos(self) -> Sequence[ModelInfo]:
        return [ModelInfo(id=name, created=0, context_length=None, loaded=False) for name in list(self.openings)]


@asynccontextmanager
async def hosting(**options: Any) -> AsyncIterator[tuple[ModelHost, Shelf]]:
    """A host of the default model 1-default, and its catalogue. In the end all models are closed."""
    host, shelf = ModelHost(**options), Shelf()
    default = shelf.find("1-default")
    host.open(default.open(Counter(), bool), opener=default, catalog=shelf)
    try:
        yield host, shelf
    finally:
        for opening in list(shelf.openings.values()):
            opening.may_open.set()
        await asyncio.to_thread(host.close)
    assert not any(opening.in_memory for opening in shelf.openings.values())


@dataclass(frozen=True)
class Lease:
    """A model that is lent until its release."""

    served: ServedModel
    stack: AsyncExitStack

    async def release(self) -> None:
        await self.stack.aclose()


async def lent(host: ModelHost, name: str | None, keep_alive: float | None = None) -> Lease:
    stack = AsyncExitStack()
    return Lease(await stack.enter_async_context(host.lease(name, keep_alive)), stack)


async def until(holds: Callable[[], bool]) -> None:
    while not holds():
        await asyncio.sleep(0.005)


async def test_a_model_is_opened_once_for_all_who_ask() -> None:
    async with hosting() as (host, shelf):
        leases = await asyncio.gather(*(lent(host, "2-a") for _ in range(5)))
        assert len({id(lease.served) for lease in leases}) == 1
        assert (await lent(host, None)).served.name == "1-default"
        assert [info.id for info in await host.infos()] == ["1-default", "2-a"]
        assert all(info.loaded for info in await host.infos())
        with pytest.raises(ApiError, match="No such"):
            await lent(host, "such")
        assert len(shelf.openings["2-a"].opened) == 1


async def test_what_is_unused_for_longest_makes_room() -> None:
    async with hosting() as (host, _shelf):
        await (await lent(host, None)).release()
        used = await lent(host, "4-used")
        await (await lent(host, "3-old")).release()
        await (await lent(host, "2-new")).release()
        await lent(host, "3-next")
        assert [model.name for model in host.by_use()] == ["3-next", "4-used", "2-new"]  # 1-default went first
        assert used.served is (await lent(host, "4-used")).served


async def test_what_is_in_use_is_waited_for() -> None:
    async with hosting() as (host, shelf):
        lease = await lent(host, "6-a")
        wanted = asyncio.ensure_future(lent(host, "7-b"))
        await until(lambda: any(one.closing for one in host.loaded.values()))
        late = asyncio.ensure_future(lent(host, "6-a"))  # behind the one that waits: or that would wait for ever
        await asyncio.sleep(0.02)
        assert not wanted.done()
        assert not late.done()
        assert shelf.openings["6-a"].in_memory
        await lease.release()
        await (await wanted).release()
        assert not shelf.openings["6-a"].in_memory
        await late
        assert not shelf.openings["7-b"].in_memory


async def test_but_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_host, "BUSY_SECONDS", 0.05)
    async with hosting() as (host, _shelf):
        lease = await lent(host, "6-a")
        with pytest.raises(ApiError, match="needs the memory of 6-a, which is still in use") as refused:
            await lent(host, "7-b")
        assert (refused.value.status, refused.value.code) == (503, "memory_in_use")
        again = await lent(host, "6-a")
        assert again.served is lease.served


async def test_a_model_that_cannot_be_opened_is_no_obstacle_for_others() -> None:
    async with hosting() as (host, shelf):
        shelf.find("2-bad").error = EngineFailed("It is damaged.", "Fetch it again.")
        for _ in range(2):
            with pytest.raises(EngineFailed, match="damaged"):
                await lent(host, "2-bad")
        await lent(host, "2-good")


async def test_only_so_many_wait() -> None:
    async with hosting(waiting=3) as (host, shelf):
        shelf.find("2-slow").may_open.clear()
        waiting = [asyncio.ensure_future(lent(host, "2-slow")) for _ in range(3)]
        await until(lambda: [*host.loading] == ["2-slow"])
        with pytest.raises(ApiError, match="3 requests wait") as refused:
            await lent(host, "2-other")
        assert refused.value.status == 429
        assert (await lent(host, None)).served.name == "1-default"  # what is in memory need not be waited for
        waiting[0].cancel()
        shelf.openings["2-slow"].may_open.set()
        await asyncio.gather(*waiting[1:])


async def test_a_model_is_closed_after_its_keep_alive() -> None:
    async with hosting(keep_alive=0.02) as (host, shelf):
        stays, goes = await lent(host, "2-stays", math.inf), await lent(host, "2-goes")
        await asyncio.sleep(0.1)
        assert shelf.openings["2-goes"].in_memory
        await stays.release()
        await goes.release()
        await until(lambda: not shelf.openings["2-goes"].in_memory)
        await asyncio.sleep(0.1)
        assert shelf.openings["2-stays"].in_memory
        assert shelf.openings["1-default"].in_memory
        await (await lent(host, "2-stays", 0.0)).release()
        await (await lent(host, None, 0.0)).release()
        await until(lambda: not host.loaded)
        assert host.default is None
        assert (await lent(host, None)).served.name == "1-default"


async def test_a_model_that_nobody_takes_is_closed_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_host, "MIN_IDLE_SECONDS", 0.02)
    async with hosting(keep_alive=0.0) as (host, shelf):
        shelf.find("2-a").may_open.clear()
        waiting = asyncio.ensure_future(lent(host, "2-a"))
        await until(lambda: [*host.loading] == ["2-a"])
        waiting.cancel()
        shelf.openings["2-a"].may_open.set()
        await until(lambda: bool(shelf.openings["2-a"].opened))
        await until(lambda: not shelf.openings["2-a"].in_memory)


async def test_a_model_is_unloaded_when_it_is_asked_for_and_none_opened_once_the_server_stops() -> None:
    async with hosting() as (host, shelf):
        lease = await lent(host, "2-a")
        assert not await host.unload("2-a")
        assert shelf.openings["2-a"].in_memory
        await lease.release()
        await until(lambda: not shelf.openings["2-a"].in_memory)
        assert await host.unload("1-default")
        shelf.openings = {"2-a": shelf.openings["2-a"]}  # the default model is one of another folder
        assert [(one.id, one.loaded) for one in await host.infos()] == [("1-default", False), ("2-a", False)]
        assert not (await host.info("1-default")).loaded
        await (await lent(host, None)).release()
        with pytest.raises(ApiError, match="2-a is not in memory"):
            await host.unload("2-a")
        host.stop()
        with pytest.raises(ApiError, match="stopping"):
            await lent(host, "2-a")


@given(
    st.lists(st.tuples(st.sampled_from(["1-default", "3-a", "4-b", "5-c", "9-d", "11-e"]), st.booleans()), max_size=25)
)
def test_memory_holds_and_nothing_in_use_is_closed(steps: list[tuple[str, bool]]) -> None:
    """Whatever is asked for and given back, in any order."""

    async def walk() -> None:
        async with hosting(waiting=100) as (host, shelf):
            held: list[Lease] = []
            waiting: list[asyncio.Task[Lease]] = []

            def check() -> None:
                assert all(not cast(Pair, lease.served.pair).closed for lease in held)
                open_now = [one for one in list(shelf.openings.values()) if one.in_memory]
                assert sum(one.size for one in open_now) <= ROOM

            for name, gives_back in steps:
                if gives_back and held:
                    await held.pop(0).release()
                waiting.append(asyncio.create_task(lent(host, name)))
                await asyncio.sleep(0)
                held.extend(task.result() for task in waiting if task.done() and task.exception() is None)
                waiting = [task for task in waiting if not task.done()]
                check()
            while waiting:
                done, _ = await asyncio.wait(waiting, timeout=0.02, return_when=asyncio.FIRST_COMPLETED)
                held.extend(task.result() for task in done if task.exception() is None)
                assert all(isinstance(task.exception(), MemoryShort | None) for task in done)
                waiting = [task for task in waiting if not task.done()]
                check()
                while held:
                    await held.pop().release()

    asyncio.run(asyncio.wait_for(walk(), 60))


def test_what_others_take_and_give_back(monkeypatch: pytest.MonkeyPatch) -> None:
    kept, closed = PairMemory(Counter(CPU=12), 10), PairMemory(Counter(CPU=25, Card0=7), 20)
    monkeypatch.setattr(model_host, "mapped_memory", lambda: None)
    assert beside_memory([kept], [closed]) == {"CPU": 10 - 5, "Card0": -7}
    monkeypatch.setattr(model_host, "mapped_memory", lambda: 0)  # llama.cpp has packed all weights again
    assert beside_memory([kept], [closed]) == {"CPU": -25, "Card0": -7}


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("5m", 300), ("1h30m", 5400), ("90", 90), (10, 10), (1.5, 1.5), ("250ms", 0.25), ("0", 0), (-1, math.inf),
        ("-1m", math.inf),
    ],
)  # fmt: skip
def test_times_are_as_in_ollama(text: str | float, seconds: float) -> None:
    assert keep_alive_seconds(text) == seconds


@pytest.mark.parametrize("text", ["", "soon", "5 m", "5x", "m", "nan", "1e3"])
def test_other_times_are_refused(text: str) -> None:
    with pytest.raises(InvalidOption, match="keep-alive"):
        keep_alive_seconds(text)
