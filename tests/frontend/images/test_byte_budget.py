"""The byte budget: in order, never stuck, nothing lost."""

from __future__ import annotations

import asyncio
import random

import pytest

from epdd.errors import Overloaded
from epdd.frontend.images.byte_budget import Budget, Share


def test_shares_fit_or_wait_in_order() -> None:
    async def go() -> None:
        budget, log = Budget(10), []

        async def use(name: str, amount: int, until: asyncio.Event) -> None:
            async with budget.hold(amount):
                log.append(name)
                await until.wait()

        first, rest = asyncio.Event(), asyncio.Event()
        tasks = [asyncio.create_task(use("a", 6, first)), asyncio.create_task(use("b", 6, rest)),
                 asyncio.create_task(use("c", 1, rest))]
        await asyncio.sleep(0.01)
        assert log == ["a"]             # c would fit, but b came first
        assert budget.used == 6
        first.set()
        await asyncio.sleep(0.01)
        assert log == ["a", "b", "c"]
        rest.set()
        await asyncio.gather(*tasks)
        assert budget.used == 0

    asyncio.run(go())


def test_shrinking_lets_the_next_in() -> None:
    async def go() -> None:
        budget = Budget(10)
        async with budget.hold(8) as share:
            task = asyncio.create_task(budget.hold(7).__aenter__())
            await asyncio.sleep(0.01)
            assert not task.done()
            share.shrink(3)
            await task
            assert budget.used == 10
            share.shrink(9)             # growing is not shrinking
            assert share.amount == 3

    asyncio.run(go())


def test_more_than_everything_runs_alone() -> None:
    async def go() -> None:
        budget = Budget(10)
        async with budget.hold(1_000) as share:
            assert share.amount == budget.used == 10
        async with budget.hold(0):
            assert budget.used == 0

    asyncio.run(go())


def test_nothing_takes_nothing_and_never_waits() -> None:
    async def go() -> None:
        budget = Budget(10)
        async with budget.hold(10):
            waiting = asyncio.create_task(budget.hold(5).__aenter__())
            await asyncio.sleep(0)
            async with asyncio.timeout(1), budget.hold(0):
                pass
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)

    asyncio.run(go())


@pytest.mark.parametrize("seed", range(20))
def test_cancelling_at_any_moment_leaks_nothing(seed: int) -> None:
    async def go() -> None:
        dice, budget, over = random.Random(seed), Budget(20), 0

        async def use(amount: int) -> None:
            nonlocal over
            async with budget.hold(amount) as share:
                assert budget.used <= 20
                await asyncio.sleep(dice.random() * 0.004)
                share.shrink(amount // 2)
                await asyncio.sleep(dice.random() * 0.004)
            over += 1

        tasks = [asyncio.create_task(use(dice.randint(0, 25))) for _ in range(60)]
        for task in dice.sample(tasks, 30):
            await asyncio.sleep(dice.random() * 0.001)
            task.cancel()
        async with asyncio.timeout(60):
            await asyncio.gather(*tasks, return_exceptions=True)
        assert budget.used == 0
        assert over >= 30

    asyncio.run(go())


def test_a_grant_and_a_cancel_in_the_same_moment() -> None:
    async def go() -> None:
        budget = Budget(10)
        holder = budget.hold(10)
        await holder.__aenter__()
        waiting = asyncio.create_task(budget.hold(10).__aenter__())
        await asyncio.sleep(0)
        await holder.__aexit__(None, None, None)    # grants
        waiting.cancel()                            # before the waiter has run
        await asyncio.gather(waiting, return_exceptions=True)
        assert budget.used == 0

    asyncio.run(go())


def test_a_waiter_cancelled_and_not_yet_run_is_passed_over() -> None:
    async def go() -> None:
        budget = Budget(10)
        holder = budget.hold(10)
        await holder.__aenter__()
        first, second = (asyncio.create_task(budget.hold(10).__aenter__()) for _ in range(2))
        await asyncio.sleep(0)
        first.cancel()                              # before it has run,
        await holder.__aexit__(None, None, None)    # the budget is given on
        async with asyncio.timeout(1):
            share = await second
        assert budget.used == share.amount == 10

    asyncio.run(go())


def test_a_share_grows_by_what_is_free_and_is_refused_the_rest() -> None:
    async def go() -> None:
        budget = Budget(10)
        async with budget.hold(4) as share:
            share.grow(5)
            with pytest.raises(Overloaded):
                share.grow(2)
            assert share.amount == budget.used == 9
        assert budget.used == 0

    asyncio.run(go())


def test_what_is_offered_is_called_in_when_others_need_it_and_not_before() -> None:
    async def go() -> None:
        budget, called = Budget(10), []
        async with budget.hold(4) as first, budget.hold(4) as second:
            for name, share in (("first", first), ("second", second)):
                def let_go(name: str = name, share: Share = share) -> None:
                    called.append(name)
                    share.shrink(0)

                share.offer(let_go)
                share.offer(let_go)             # with every token
            async with budget.hold(2):
                assert called == [] and budget.used == 10
                async with budget.hold(3):      # the one that offered first is enough
                    assert called == ["first"] and budget.used == 9
                second.keep()
                with pytest.raises(Overloaded):
                    first.grow(5)
                assert called == ["first"]
                second.offer(let_go)
                first.grow(5)                   # refused no more
                assert called == ["first", "second"] and budget.used == 7
        assert budget.used == 0

    asyncio.run(go())


def test_an_offer_that_others_wait_for_is_taken_at_once() -> None:
    async def go() -> None:
        budget = Budget(10)
        async with budget.hold(8) as share:
            task = asyncio.create_task(budget.hold(7).__aenter__())
            await asyncio.sleep(0)
            assert not task.done()
            share.offer(lambda: share.shrink(0))
            await task
        assert budget.used == 7

    asyncio.run(go())
