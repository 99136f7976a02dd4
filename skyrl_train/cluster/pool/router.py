"""Distribution of generation requests over engines.

Requests with the same route key (samples of a prompt, turns of a sample) go to the same engine, so that their common
prefix is computed once. Requests of one iteration of the event loop go to an engine in one call: a thousand concurrent
`generate` calls cost one message per engine, and a few for the results.

If an engine dies, its pending requests are sent to the others, and held while there are none. A request that was on
several dead engines is abandoned: it is probably the cause.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field

from skyrl_train.types import Generation, SamplingParams

Request = tuple[int, list[int], SamplingParams]
GenerateBatch = Callable[[list[Request]], AsyncIterator[list[tuple[int, Generation]]]]
"""One engine: (index, prompt token ids, parameters) in, lists of (index, generation) out as they finish."""

MAX_LOSSES = 4
"""Give up on a request once this many engines have died serving it: it is probably the cause."""
REMEMBERED_KEYS = 100_000
"""Route keys whose engine is remembered; the least recently used is dropped first."""


class EngineFailedError(RuntimeError):
    """An engine failed while it worked on a request; the cause is attached."""


class EngineLostError(RuntimeError):
    """Raised by a `GenerateBatch` whose engine is dead, after `remove`: other engines take over."""


@dataclass(slots=True)
class _Call:
    """One call of `generate`."""

    token_ids: list[int]
    params: SamplingParams
    route_key: str
    future: asyncio.Future[Generation]
    engine: _Engine | None = None
    """Engine that works on it; None while it is held, and once it is done."""
    losses: int = 0
    """Number of engines that died while they worked on it."""


@dataclass(slots=True)
class _Engine:
    generate_batch: GenerateBatch
    waiting: list[_Call] = field(default_factory=list)
    """Sent at the end of this iteration of the event loop."""
    load: int = 0
    """Number of requests waiting or running."""
    serves: bool = True


class Router:
    """`router.generate` is a `types.Generate`, for one event loop."""

    def __init__(self, engines: Sequence[GenerateBatch], when_held: Callable[[], None] = lambda: None) -> None:
        """Args: when_held: called when a request finds no serving engine; may lead to `add` or `fail`."""
        if not engines:
            raise ValueError("generator.num_inference_engines is 0: a router needs an engine. Set it to at least 1")
        self._engines = [_Engine(generate_batch) for generate_batch in engines]
        self._routes: OrderedDict[str, int] = OrderedDict()
        self._tasks: set[asyncio.Task[None]] = set()
        self._held: list[_Call] = []
        self._when_held = when_held
        self._end: BaseException | None = None
        """Error of every further request."""

    async def generate(self, token_ids: list[int], params: SamplingParams, route_key: str) -> Generation:
        """Raises: EngineFailedError if the engine fails. A batch that nobody waits for any more is aborted."""
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
        """Assign prompts to engines again once their prefix caches are reset; else prompts of a step would be unevenly
        distributed, each to its engine of the last epoch.
        """
        self._routes.clear()

    def remove(self, number: int) -> None:
        """Stop using this engine; its pending requests go to others when its stream fails."""
        self._engines[number].serves = False
        self._routes = OrderedDict((key, home) for key, home in self._routes.items() if home != number)

    def add(self, number: int) -> None:
        """Use this engine (again), also for held requests."""
        self._engines[number].serves = True
        held, self._held = self._held, []
        for call in held:
            self._place(call)

    def fail(self, error: BaseException) -> None:
        """Fail held requests and all later ones with the error: no engine will be added."""
        self._end = error
        held, self._held = self._held, []
        for call in held:
            self._place(call)

    async def close(self) -> None:
        """Abort all requests; later ones fail."""
        self.fail(EngineFailedError("the request was aborted: the router was closed"))
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
        task.add_done_callback(lambda ended: self._finish(number, ended, calls))
        callers = {call.future for call in calls.values()}

        def caller_left(future: asyncio.Future[Generation]) -> None:
            callers.discard(future)
            if not callers and any(call.future.cancelled() for call in calls.values()):
                task.cancel()

        for call in calls.values():
            call.future.add_done_callback(caller_left)

    def _finish(self, number: int, ended: asyncio.Task[None], calls: dict[int, _Call]) -> None:
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
        f"{call.losses} engines died while serving this request{others}; it is probably the cause: prompt "
        f"{call.route_key!r}, {len(call.token_ids)} tokens, at most {call.params.max_generate_length} to generate. "
        f"The last failure: {cause}"
    )
    error.__cause__ = cause
    return error


def _failure(number: int, cause: BaseException | None) -> EngineFailedError:
    if cause is None:
        return EngineFailedError(f"inference engine {number} ended its stream before all requests were done")
    if isinstance(cause, asyncio.CancelledError):
        return EngineFailedError(f"a request to inference engine {number} was aborted: the router was closed")
    error = EngineFailedError(f"inference engine {number} failed: {type(cause).__name__}: {cause}")
    error.__cause__ = cause
    return error
