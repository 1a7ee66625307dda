"""The order in which requests get free slots."""

from __future__ import annotations

import asyncio

import pytest

from epdd.frontend.images.turns import Turns


class Slots:
    """Requests that take slots and hold them until released."""

    def __init__(self, count: int) -> None:
        self.turns, self.order = Turns(count), list[str]()
        self.ends: dict[asyncio.Task[None], asyncio.Event] = {}

    def take(self, request: str) -> asyncio.Task[None]:
        end = asyncio.Event()

        async def held() -> None:
            async with self.turns.take(request):
                self.order.append(request)
                await end.wait()

        task = asyncio.create_task(held())
        self.ends[task] = end
        return task

    async def end(self, *tasks: asyncio.Task[None]) -> None:
        for task in tasks:
            self.ends[task].set()
        await asyncio.gather(*tasks)
        await asyncio.sleep(0)


def test_a_request_with_many_lets_others_go_first() -> None:
    async def test() -> None:
        slots = Slots(2)
        many = [slots.take("many") for _ in range(5)]
        few = [slots.take("b"), slots.take("b"), slots.take("c")]
        await asyncio.sleep(0)
        assert slots.order == ["many", "many"]
        await slots.end(many[0], many[1])
        assert slots.order[2:] == ["many", "b"]
        await slots.end(many[2], few[0])
        assert slots.order[4:] == ["c", "many"]
        await slots.end(few[2], many[3])
        assert slots.order[6:] == ["b", "many"]
        await slots.end(few[1], many[4])
        await slots.end(slots.take("d"), slots.take("e"), slots.take("f"))
        assert slots.order[8:] == ["d", "e", "f"]

    asyncio.run(test())


@pytest.mark.parametrize("granted", [False, True])
def test_no_slot_is_lost_with_a_request_that_leaves(granted: bool) -> None:
    async def test() -> None:
        slots = Slots(1)
        first, second = slots.take("a"), slots.take("b")
        await asyncio.sleep(0)
        if granted:
            slots.ends[first].set()
            await asyncio.sleep(0)
            second.cancel()             # its slot is granted, and its task has not run yet
        else:
            second.cancel()
            slots.ends[first].set()     # the slot is released before its task runs
        await asyncio.gather(first, second, return_exceptions=True)
        for _ in range(3):
            await slots.end(slots.take("c"))
        assert slots.order == ["a", "c", "c", "c"]

    asyncio.run(test())
