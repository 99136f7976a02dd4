"""Spreads generation requests over engines.

Requests with one route key (the samples of a prompt, the turns of a sample) go to one engine, so that their common
prefix is computed once. All requests made in one turn of the event loop go to an engine in one call: a thousand
concurrent `generate` calls cost one message per engine, and a few for the answers.

An engine may be lost: what it had not answered is sent to the others, and is held while there are none. A request that
was with several lost engines is given up: it may be what they died of.
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

MAX_LOSSES = 4
"""So many engines may be lost with one request in flight; that it is none of its doing is then hard to believe."""
REMEMBERED_KEYS = 100_000
"""Route keys whose engine is known; the longest unused is forgotten first and would be dealt anew."""


class EngineFailedError(RuntimeError):
    """An engine broke off while it worked on a request; the cause is attached."""


class EngineLostError(RuntimeError):
    """Raised by a `GenerateBatch` whose engine is gone, after the router was told with `remove`: others take over."""


@dataclass(slots=True)
class _Call:
    """One call of `generate`."""

    token_ids: list[int]
    params: SamplingParams
    route_key: str
    future: asyncio.Future[Generation]
    engine: _Engine | None = None
    """The one that it waits for; None while it is held, and when it is answered."""
    losses: int = 0
    """Engines that were lost while they worked on it."""


@dataclass(slots=True)
class _Engine:
    generate_batch: GenerateBatch
    waiting: list[_Call] = field(default_factory=list)
    """To be sent at the end of this turn of the event loop."""
    load: int = 0
    """Requests waiting or running."""
    serves: bool = True


class Router:
    """`router.generate` is a `types.Generate`; to be used in one event loop."""

    def __init__(self, engines: Sequence[GenerateBatch], when_held: Callable[[], None] = lambda: None) -> None:
        """Args: when_held is called when a request finds no engine that serves, and may lead to `add` or `fail`."""
        if not engines:
            raise ValueError("a router needs at least one engine; generator.num_inference_engines must be at least 1")
        self._engines = [_Engine(generate_batch) for generate_batch in engines]
        self._routes: OrderedDict[str, int] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: list[_Call] = []
        self._when_held = when_held
        self._end: BaseException | None = None
        """What every further request fails with."""

    async def generate(self, token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        """Raises: EngineFailedError if the engine breaks off. Cancelling the last caller of a batch aborts it."""
        call = _Call(token_ids, params, route_key, asyncio.get_running_loop().create_future())
        self._place(call)
        try:
            return await call.future
        finally:
            _leave(call)

    @property
    def loads(self) -> list[int]:
        """Requests waiting or running, per engine."""
        return [engine.load for engine in self._engines]

    @property
    def is_holding(self) -> bool:
        """Whether callers wait for an engine to be added."""
        return any(not call.future.done() for call in self._held)

    def forget_routes(self) -> None:
        """Deal all prompts anew, when the engines have forgotten their prefixes: the prompts of another step would
        else come to lie unevenly, where each of them happened to be at the last epoch."""
        self._routes.clear()

    def remove(self, number: int) -> None:
        """Send nothing more to this engine; what it works on is sent to others when its stream breaks off."""
        self._engines[number].serves = False
        self._routes = OrderedDict((key, home) for key, home in self._routes.items() if home != number)

    def add(self, number: int) -> None:
        """Use this engine (again), also for what was held."""
        self._engines[number].serves = True
        held, self._held = self._held, []
        for call in held:
            self._place(call)

    def fail(self, error: BaseException) -> None:
        """No engine will come back: end what is held, and every later call, with the error."""
        self._end = error
        held, self._held = self._held, []
        for call in held:
            self._place(call)

    async def close(self) -> None:
        """Abort everything that runs; later calls fail too."""
        self.fail(EngineFailedError("a request was aborted, because the router was closed"))
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _place(self, call: _Call) -> None:
        _leave(call)
        if call.future.done():
            return
        if self._end is not None:
            call.future.set_exception(self._end)
            return
        if not any(engine.serves for engine in self._engines):
            self._held.append(call)
            self._when_held()
            return
        number = self._route(call.route_key)
        engine = call.engine = self._engines[number]
        engine.load += 1
        if not engine.waiting:
            asyncio.get_running_loop().call_soon(self._send, number)
        engine.waiting.append(call)

    def _route(self, route_key: str) -> int:
        if route_key not in self._routes:
            serving = [number for number, engine in enumerate(self._engines) if engine.serves]
            self._routes[route_key] = min(serving, key=lambda number: self._engines[number].load)
            if len(self._routes) > REMEMBERED_KEYS:
                self._routes.popitem(last=False)
        self._routes.move_to_end(route_key)
        return self._routes[route_key]

    def _send(self, number: int) -> None:
        engine = self._engines[number]
        waiting, engine.waiting = engine.waiting, []
        if self._end is not None or not engine.serves:
            for call in waiting:
                self._place(call)
            return
        calls = {index: call for index, call in enumerate(waiting) if not call.future.done()}
        if not calls:
            return
        requests: list[Request] = [(index, call.token_ids, call.params) for index, call in calls.items()]
        task = asyncio.get_running_loop().create_task(_stream_into(engine.generate_batch(requests), calls))
        self._tasks.add(task)
        task.add_done_callback(lambda ended: self._answer_the_rest(number, ended, calls))
        callers = {call.future for call in calls.values()}

        def caller_left(future: asyncio.Future[Generation]) -> None:
            callers.discard(future)
            if future.cancelled() and not callers:
                task.cancel()

        for call in calls.values():
            call.future.add_done_callback(caller_left)

    def _answer_the_rest(self, number: int, ended: asyncio.Task[None], calls: dict[int, _Call]) -> None:
        self._tasks.discard(ended)
        cause = asyncio.CancelledError() if ended.cancelled() else ended.exception()
        unanswered = [call for call in calls.values() if not call.future.done()]
        if not isinstance(cause, EngineLostError):
            for call in unanswered:
                call.future.set_exception(_failure(number, cause))
            return
        for call in unanswered:
            call.losses += 1
        suspects = [call for call in unanswered if call.losses >= MAX_LOSSES]
        for call in suspects:
            call.future.set_exception(_suspicion(call, len(suspects) - 1, cause))
        for call in unanswered:
            self._place(call)


async def _stream_into(stream: AsyncIterator[list[tuple[int, Generation]]], calls: dict[int, _Call]) -> None:
    try:
        async for finished in stream:
            for index, generation in finished:
                if not calls[index].future.done():
                    calls[index].future.set_result(generation)
    finally:
        if isinstance(stream, AsyncGenerator):
            await stream.aclose()


def _leave(call: _Call) -> None:
    if call.engine is not None:
        call.engine.load -= 1
        call.engine = None


def _suspicion(call: _Call, num_others: int, cause: EngineLostError) -> EngineFailedError:
    others = f" and {num_others} others" if num_others else ""
    error = EngineFailedError(
        f"{call.losses} engines were lost one after the other with this request{others} in flight, which may be what "
        f"they died of: prompt {call.route_key!r}, {len(call.token_ids)} tokens, at most "
        f"{call.params.max_generate_length} to answer. The last one: {cause}"
    )
    error.__cause__ = cause
    return error


def _failure(number: int, cause: BaseException | None) -> EngineFailedError:
    if cause is None:
        return EngineFailedError(f"inference engine {number} ended its answers without answering every request")
    if isinstance(cause, asyncio.CancelledError):
        return EngineFailedError(f"a request to inference engine {number} was aborted, because the router was closed")
    error = EngineFailedError(f"inference engine {number} failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
