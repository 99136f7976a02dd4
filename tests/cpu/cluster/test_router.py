"""The router, against engines of a few lines."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from skyrl_train.cluster.pool.router import MAX_LOSSES, EngineFailedError, EngineLostError, Request, Router
from skyrl_train.types import Generation, SamplingParams

PARAMS = SamplingParams(max_generate_length=4)


def answer(token_ids: list[int]) -> Generation:
    return Generation(token_ids=token_ids[::-1], logprobs=[], text="", stop_reason="stop", policy_version=0)


class Engine:
    """Answers each prompt with its reverse, in two messages; notes what it was asked and what was aborted."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.batches: list[list[Request]] = []
        self.aborted = 0
        self.delay_s = delay_s

    async def __call__(self, requests: list[Request]) -> AsyncIterator[list[tuple[int, Generation]]]:
        self.batches.append(requests)
        try:
            await asyncio.sleep(self.delay_s)
            half = len(requests) // 2
            for part in (requests[:half], requests[half:]):
                yield [(index, answer(token_ids)) for index, token_ids, _ in part]
        except asyncio.CancelledError:
            self.aborted += 1
            raise


async def broken(requests: list[Request]) -> AsyncIterator[list[tuple[int, Generation]]]:
    yield [(requests[0][0], answer(requests[0][1]))]
    raise OSError("the wire was cut")


async def forgetful(requests: list[Request]) -> AsyncIterator[list[tuple[int, Generation]]]:
    yield [(requests[0][0], answer(requests[0][1]))]


def test_every_caller_gets_the_answer_to_its_own_prompt():
    async def main() -> None:
        router = Router([Engine(), Engine(), Engine()])
        prompts = [[n, n + 1, n + 2] for n in range(50)]
        answers = await asyncio.gather(*(router.generate(prompt, PARAMS, str(prompt[0] % 7)) for prompt in prompts))
        assert [generation.token_ids for generation in answers] == [prompt[::-1] for prompt in prompts]

    asyncio.run(main())


def test_requests_of_one_moment_reach_an_engine_in_one_call():
    async def main() -> None:
        engines = [Engine(), Engine()]
        router = Router(engines)
        await asyncio.gather(*(router.generate([n], PARAMS, str(n // 8)) for n in range(1024)))
        assert [len(engine.batches) for engine in engines] == [1, 1]
        assert [len(engine.batches[0]) for engine in engines] == [512, 512]

    asyncio.run(main())


def test_samples_of_one_prompt_stay_on_one_engine_over_all_turns():
    async def main() -> None:
        engines = [Engine() for _ in range(3)]
        router = Router(engines)

        async def turns(key: int) -> None:
            for turn in range(3):
                await router.generate([key, turn], PARAMS, str(key))
                await asyncio.sleep(0.001 * (key % 3))

        await asyncio.gather(*(turns(key) for key in range(30)))
        for key in range(30):
            homes = [
                number
                for number, engine in enumerate(engines)
                if any(token_ids[0] == key for batch in engine.batches for _, token_ids, _ in batch)
            ]
            assert len(homes) == 1

    asyncio.run(main())


def test_a_new_prompt_goes_to_the_least_loaded_engine():
    async def main() -> None:
        may_answer = asyncio.Event()

        class Held(Engine):
            async def __call__(self, requests: list[Request]) -> AsyncIterator[list[tuple[int, Generation]]]:
                await may_answer.wait()
                async for part in super().__call__(requests):
                    yield part

        router = Router([Held(), Held()])
        long_group = [asyncio.create_task(router.generate([0], PARAMS, "a")) for _ in range(8)]
        while sum(router.loads) < 8:
            await asyncio.sleep(0)
        others = [asyncio.create_task(router.generate([1], PARAMS, key)) for key in "bcdefg"]
        while sum(router.loads) < 14:
            await asyncio.sleep(0)
        assert router.loads == [8, 6]
        may_answer.set()
        await asyncio.gather(*long_group, *others)
        assert router.loads == [0, 0]

    asyncio.run(main())


def test_prompts_are_distributed_again_after_their_prefixes_were_dropped():
    async def main() -> None:
        engines = [Engine(), Engine()]
        router = Router(engines)
        await asyncio.gather(*(router.generate([n], PARAMS, str(n)) for n in range(8)))
        router.forget_routes()
        on_the_first = [ids[0] for _, ids, _ in engines[0].batches[0]]
        await asyncio.gather(*(router.generate([n], PARAMS, str(n)) for n in on_the_first))
        assert [len(engine.batches[1]) for engine in engines] == [2, 2]

    asyncio.run(main())


@pytest.mark.parametrize(("engine", "reason"), [(broken, "the wire was cut"), (forgetful, "before all requests")])
def test_a_failed_engine_fails_its_waiting_callers_and_no_others(engine, reason):
    async def main() -> None:
        router = Router([engine, Engine()])
        calls = [router.generate([n], PARAMS, "left" if n % 2 == 0 else "right") for n in range(6)]
        results = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(results[0], Generation)
        for result in (results[2], results[4]):
            assert isinstance(result, EngineFailedError)
            assert "engine 0" in str(result) and reason in str(result)
        assert all(isinstance(result, Generation) for result in results[1::2])

    asyncio.run(main())


class Mortal(Engine):
    """Is lost after so many answers, which the router learns before the stream fails."""

    def __init__(self, answers: int) -> None:
        super().__init__()
        self.answers, self.router, self.number = answers, None, 0

    async def __call__(self, requests: list[Request]) -> AsyncIterator[list[tuple[int, Generation]]]:
        self.batches.append(requests)
        for index, token_ids, _ in requests[: self.answers]:
            yield [(index, answer(token_ids))]
        self.router.remove(self.number)
        raise EngineLostError("it was killed")


def mortals(*engines: Engine) -> Router:
    router = Router(engines)
    for number, engine in enumerate(engines):
        if isinstance(engine, Mortal):
            engine.router, engine.number = router, number
    return router


def test_what_a_dead_engine_had_not_answered_is_answered_by_the_others_and_counted_once():
    async def main() -> None:
        lost, other = Mortal(answers=3), Engine()
        router = mortals(lost, other)
        results = await asyncio.gather(*(router.generate([n, 7], PARAMS, str(n)) for n in range(16)))
        assert [one.token_ids for one in results] == [[7, n] for n in range(16)]
        assert len(lost.batches[0]) == 8 and sum(map(len, other.batches)) == 8 + 5
        assert router.loads == [0, 0], "a negative load draws every prompt that follows"

    asyncio.run(main())


def test_requests_are_held_while_no_engine_serves_and_one_asks_for_help():
    async def main() -> None:
        asked: list[int] = []
        engine = Engine()
        router = Router([engine], lambda: asked.append(1))
        router.remove(0)
        calls = [asyncio.create_task(router.generate([n], PARAMS, "a")) for n in range(3)]
        await asyncio.sleep(0.01)
        assert asked and router.is_holding and not engine.batches and router.loads == [0]
        for call in calls[:2]:
            call.cancel()
        router.add(0)
        assert (await calls[2]).token_ids == [2] and not router.is_holding
        assert [[ids for _, ids, _ in batch] for batch in engine.batches] == [[[2]]] and router.loads == [0]

    asyncio.run(main())


def test_a_prompt_moves_to_a_live_engine_and_never_back_to_a_dead_one():
    async def main() -> None:
        engines = [Engine(), Engine()]
        router = Router(engines)
        await router.generate([1], PARAMS, "a")
        home = 0 if engines[0].batches else 1
        router.remove(home)
        await router.generate([1], PARAMS, "a")
        router.add(home)
        await router.generate([1], PARAMS, "a")
        assert [len(engine.batches) for engine in (engines[home], engines[1 - home])] == [1, 2]

    asyncio.run(main())


def test_a_request_that_several_engines_died_serving_fails_with_its_name():
    async def main() -> None:
        engines = [Mortal(answers=0) for _ in range(MAX_LOSSES + 2)]
        router = mortals(*engines)
        with pytest.raises(
            EngineFailedError,
            match=f"{MAX_LOSSES} engines died while serving .*prompt 'row-7', 3 tokens, at most 4 .* was killed",
        ):
            await asyncio.wait_for(router.generate([1, 2, 3], PARAMS, "row-7"), 60)
        assert sum(len(engine.batches) for engine in engines) == MAX_LOSSES
        assert router.loads == [0] * len(engines)

    asyncio.run(main())


def test_a_batch_is_aborted_when_its_last_caller_leaves():
    async def main() -> None:
        engine = Engine(delay_s=10)
        router = Router([engine])
        callers = [asyncio.create_task(router.generate([n], PARAMS, "a")) for n in range(3)]
        await asyncio.sleep(0.01)
        callers[0].cancel()
        callers[1].cancel()
        await asyncio.sleep(0.01)
        assert engine.aborted == 0
        callers[2].cancel()
        await asyncio.sleep(0.01)
        assert engine.aborted == 1
        assert router.loads == [0]

    asyncio.run(main())


def test_a_batch_is_aborted_when_the_others_have_their_answers():
    async def main() -> None:
        answers, ended = asyncio.Event(), asyncio.Event()

        async def engine(requests: list[Request]) -> AsyncIterator[list[tuple[int, Generation]]]:
            try:
                await answers.wait()
                yield [(1, answer([1]))]
                await asyncio.sleep(10)
            finally:
                ended.set()

        router = Router([engine])
        leaving, staying = (asyncio.create_task(router.generate([n], PARAMS, "a")) for n in range(2))
        await asyncio.sleep(0.01)
        leaving.cancel()
        answers.set()
        assert (await staying).token_ids == [1]
        await asyncio.wait_for(ended.wait(), 5)

    asyncio.run(main())


def test_a_caller_that_left_before_the_call_is_not_sent():
    async def main() -> None:
        engine = Engine()
        router = Router([engine])
        leaving = asyncio.create_task(router.generate([0], PARAMS, "a"))
        staying = asyncio.create_task(router.generate([1], PARAMS, "a"))
        asyncio.get_running_loop().call_soon(leaving.cancel)
        assert (await staying).token_ids == [1]
        assert [token_ids for _, token_ids, _ in engine.batches[0]] == [[1]]
        assert leaving.cancelled()

    asyncio.run(main())


@pytest.mark.parametrize("turns_of_the_loop", [1, 2, 3, 10])
def test_closing_the_router_ends_every_wait(turns_of_the_loop):
    async def main() -> None:
        router = Router([Engine(delay_s=1000)])
        caller = asyncio.create_task(router.generate([0], PARAMS, "a"))
        for _ in range(turns_of_the_loop):
            await asyncio.sleep(0)
        await router.close()
        with pytest.raises(EngineFailedError, match="router was closed"):
            await asyncio.wait_for(caller, timeout=60)

    asyncio.run(main())


def test_a_router_without_engines_is_refused():
    with pytest.raises(ValueError, match="num_inference_engines"):
        Router([])
