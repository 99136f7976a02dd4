"""Spreads generation requests over engines.

Requests with one route key (the samples of a prompt, the turns of a sample) go to one engine, so that their common
prefix is computed once. All requests made in one turn of the event loop go to an engine in one call: a thousand
concurrent `generate` calls cost one message per engine, and a few for the answers.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from skyrl_train.types import Generation, SamplingParams

Request = tuple[int, list[int], SamplingParams]
GenerateBatch = Callable[[list[Request]], AsyncIterator[list[tuple[int, Generation]]]]
"""One engine: (index, prompt token ids, parameters) in, lists of (index, generation) out as they end."""

REMEMBERED_KEYS = 100_000
"""Route keys whose engine is known; the longest unused is forgotten first and would be dealt anew."""


class EngineFailedError(RuntimeError):
    """An engine broke off while it worked on a request; the cause is attached."""


@dataclass(slots=True)
class _Engine:
    generate_batch: GenerateBatch
    waiting: list[tuple[list[int], SamplingParams, asyncio.Future[Generation]]] = field(default_factory=list)
    """To be sent at the end of this turn of the event loop."""
    load: int = 0
    """Requests waiting or running."""


class Router:
    """`router.generate` is a `types.Generate`; to be used in one event loop."""

    def __init__(self, engines: Sequence[GenerateBatch]) -> None:
        if not engines:
            raise ValueError("a router needs at least one engine; generator.num_inference_engines must be at least 1")
        self._engines = [_Engine(generate_batch) for generate_batch in engines]
        self._routes: OrderedDict[str, int] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    async def generate(self, token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        """Raises: EngineFailedError if the engine breaks off. Cancelling the last caller of a batch aborts it."""
        loop = asyncio.get_running_loop()
        number = self._route(route_key)
        engine = self._engines[number]
        future: asyncio.Future[Generation] = loop.create_future()
        if not engine.waiting:
            loop.call_soon(self._send, number)
        engine.waiting.append((token_ids, params, future))
        engine.load += 1
        try:
            return await future
        finally:
            engine.load -= 1

    @property
    def loads(self) -> list[int]:
        """Requests waiting or running, per engine."""
        return [engine.load for engine in self._engines]

    def forget_routes(self) -> None:
        """Deal all prompts anew, when the engines have forgotten their prefixes: the prompts of another step would
        else come to lie unevenly, where each of them happened to be at the last epoch."""
        self._routes.clear()

    async def close(self) -> None:
        """Abort everything that runs; later calls fail too."""
        self._closed = True
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _route(self, route_key: str) -> int:
        if route_key not in self._routes:
            self._routes[route_key] = min(range(len(self._engines)), key=lambda number: self._engines[number].load)
            if len(self._routes) > REMEMBERED_KEYS:
                self._routes.popitem(last=False)
        self._routes.move_to_end(route_key)
        return self._routes[route_key]

    def _send(self, number: int) -> None:
        engine = self._engines[number]
        waiting, engine.waiting = engine.waiting, []
        requests: list[Request] = []
        futures: dict[int, asyncio.Future[Generation]] = {}
        for index, (token_ids, params, future) in enumerate(waiting):
            if not future.done():
                requests.append((index, token_ids, params))
                futures[index] = future
        if self._closed:
            for future in futures.values():
                future.set_exception(_failure(number, asyncio.CancelledError()))
            return
        if not requests:
            return
        task = asyncio.get_running_loop().create_task(_stream_into(engine.generate_batch(requests), futures))
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._answer_the_rest(number, ended, futures))
        callers = set(futures.values())

        def caller_left(future: asyncio.Future[Generation]) -> None:
            callers.discard(future)
            if future.cancelled() and not callers:
                task.cancel()

        for future in futures.values():
            future.add_done_callback(caller_left)

    def _answer_the_rest(
        self, number: int, ended: asyncio.Task[None], futures: dict[int, asyncio.Future[Generation]]
    ) -> None:
        self._tasks.discard(ended)
        cause = asyncio.CancelledError() if ended.cancelled() else ended.exception()
        for future in futures.values():
            if not future.done():
                future.set_exception(_failure(number, cause))


async def _stream_into(
    stream: AsyncIterator[list[tuple[int, Generation]]], futures: dict[int, asyncio.Future[Generation]]
) -> None:
    try:
        async for finished in stream:
            for index, generation in finished:
                if not futures[index].done():
                    futures[index].set_result(generation)
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


def _failure(number: int, cause: BaseException | None) -> EngineFailedError:
    if cause is None:
        return EngineFailedError(f"inference engine {number} ended its answers without answering every request")
    if isinstance(cause, asyncio.CancelledError):
        return EngineFailedError(f"a request to inference engine {number} was aborted, because the router was closed")
    error = EngineFailedError(f"inference engine {number} failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
