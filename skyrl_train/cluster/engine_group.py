"""The vLLM engines as the trainer sees them."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from skyrl_train.cluster.calls import Calls, RemoteFailed
from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.process import host, log_to, talk_through_node_address, use_devices
from skyrl_train.hub import local_folder
from skyrl_train.inference.engine import Engine
from skyrl_train.inference.remote import RemoteEngine
from skyrl_train.inference.router import Router
from skyrl_train.inference.settings import EngineSettings, RemoteEngineSettings
from skyrl_train.types import Generate, Generation, SamplingParams
from skyrl_train.weight_sync.transport import ControlMessage

# Requests in flight come as a handful of batches; the rest are control calls that must never queue behind them.
MAX_CONCURRENCY = 1000
SHUTDOWN_S = 15
"""Patience with engines that are asked to end."""


@dataclass(frozen=True, slots=True)
class Started:
    """What an engine says of itself when it is ready."""

    num_workers: int
    url: str | None
    """Of the HTTP endpoint that it offers, if any."""


class EngineActor(Engine):
    """An Engine whose process writes its own log file.

    It is built by `start`: of an error in an actor's constructor Ray keeps no more than the text of a stack.
    """

    def __init__(self, log_path: str, visible_devices: str | None) -> None:
        use_devices(visible_devices)
        log_to(log_path)
        talk_through_node_address()

    async def start(self, settings: EngineSettings) -> Started:
        """A hub model is downloaded to this node first."""
        http = settings.http and replace(settings.http, advertised_host=host())
        super().__init__(replace(settings, model_path=local_folder(settings.model_path), http=http))
        num_workers = (await self.ready())["num_workers"]
        return Started(num_workers, None if http is None else await self.start_server())


class RemoteEngineActor(RemoteEngine):
    """As EngineActor, for a server that runs already; it needs no GPU and next to no CPU."""

    def __init__(self, log_path: str) -> None:
        log_to(log_path)

    async def start(self, settings: RemoteEngineSettings) -> Started:
        super().__init__(replace(settings, model_path=local_folder(settings.model_path)))
        return Started((await self.ready())["num_workers"], None)


def _actor_class(settings: EngineSettings | RemoteEngineSettings) -> Any:
    return ray.remote(RemoteEngineActor if isinstance(settings, RemoteEngineSettings) else EngineActor)


class EngineGroup:
    """All engines, each of them holding the same weights."""

    def __init__(
        self,
        slots: Sequence[Slot],
        settings: Sequence[EngineSettings | RemoteEngineSettings],
        log_folder: str,
        timeout_s: float,
        visible_devices: Sequence[str | None] | None = None,
    ) -> None:
        """Asks Ray to start the engines' processes and returns at once; `start` has them load their models.

        Args: visible_devices of each engine, where they are not those that Ray gives it.
        """
        names = tuple(f"engine-{index}" for index in range(len(settings)))
        self._calls = Calls(names, timeout_s, log_folder)
        self._settings = tuple(settings)
        self._num_workers: list[int] = []
        self.actors = [
            _actor_class(one)
            .options(
                num_cpus=slot.num_cpus,
                num_gpus=slot.num_gpus,
                scheduling_strategy=slot.strategy,
                max_concurrency=MAX_CONCURRENCY,
            )
            .remote(f"{log_folder}/{name}.log", visible)
            for slot, name, one, visible in zip(
                slots, names, settings, visible_devices or [None] * len(slots), strict=True
            )
        ]
        self.urls: tuple[str, ...] = ()
        """Of the engines' HTTP endpoints, where they have them; known when they have started."""
        self._router = Router([self._stream(index) for index in range(len(settings))])

    @property
    def generate(self) -> Generate:
        return self._router.generate

    def _stream(self, index: int) -> Any:
        async def stream(
            requests: Sequence[tuple[int, list[int], SamplingParams]],
        ) -> AsyncIterator[list[tuple[int, Generation]]]:
            results = self.actors[index].generate_batch.options(num_returns="streaming").remote(requests)
            name, timeout_s = self._calls.names[index], self._calls.timeout_s
            try:
                while True:
                    ref = await asyncio.wait_for(anext(results), timeout_s)
                    yield await ref
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise RemoteFailed(
                    f"{name} finished none of its requests within trainer.timeout_s={timeout_s:g} s: it hangs, or "
                    f"responses take longer than that (log: {self._calls.log_folder}/{name}.log)"
                ) from error
            except (RayTaskError, RayActorError) as error:
                raise RemoteFailed(self._calls.describe(name, "generate", error)) from error

        return stream

    async def start(self) -> None:
        """Returns when every engine has loaded its model, and every server was found fit."""
        starts = [actor.start.remote(one) for actor, one in zip(self.actors, self._settings, strict=True)]
        started: list[Started] = await self._calls.gather("start", starts)
        self._num_workers = [one.num_workers for one in started]
        self.urls = tuple(one.url for one in started if one.url is not None)

    @property
    def num_workers(self) -> int:
        """Of all engines that have started."""
        return sum(self._num_workers)

    async def init_weight_sync(self, info: ControlMessage) -> None:
        offsets = [1 + sum(self._num_workers[:index]) for index in range(len(self.actors))]
        infos = [info | {"rank_offset": offset} for offset in offsets]
        calls = [actor.init_weight_sync.remote(one) for actor, one in zip(self.actors, infos, strict=True)]
        await self._calls.gather("connect the weight sync", calls)

    async def pause(self) -> None:
        """Stop drawing tokens; the engines forget every cached prefix."""
        self._router.forget_routes()
        await self._calls.gather("pause", [actor.pause.remote() for actor in self.actors])

    async def start_weight_update(self) -> None:
        await self._calls.gather("start a weight update", [actor.start_weight_update.remote() for actor in self.actors])

    async def finish_weight_update(self, policy_version: int, digests: dict[str, int]) -> None:
        """Raises: RemoteFailed if what an engine received is not what was sent, tensor by tensor."""
        calls = [actor.finish_weight_update.remote(policy_version, digests) for actor in self.actors]
        await self._calls.gather("finish a weight update", calls)

    async def resume(self) -> None:
        await self._calls.gather("resume", [actor.resume.remote() for actor in self.actors])

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the devices; weights come back from host memory if kept, else with the next update."""
        self._router.forget_routes()
        calls = [actor.sleep.remote(keep_weights=keep_weights) for actor in self.actors]
        await self._calls.gather("fall asleep", calls)

    async def wake_weights(self) -> None:
        await self._calls.gather("wake its weights", [actor.wake_weights.remote() for actor in self.actors])

    async def wake_kv_cache(self) -> None:
        """Generation goes on."""
        await self._calls.gather("wake its KV cache", [actor.wake_kv_cache.remote() for actor in self.actors])

    async def memory(self) -> list[dict[str, float]]:
        """What each engine's worker holds, as `device.memory_in_use`."""
        workers = await self._calls.gather("tell its memory", [actor.memory.remote() for actor in self.actors])
        return [worker for engine in workers for worker in engine]

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[list[float]]]:
        """Per engine, per prompt, the logprob of each token given those before it; 0 for the first."""
        return await self._calls.gather(
            "score prompts", [actor.prompt_logprobs.remote(prompts) for actor in self.actors]
        )

    async def shutdown(self) -> None:
        """End the engines' processes; an engine that does not end by itself, or is dead already, is killed."""
        calls = [asyncio.wrap_future(actor.shutdown.remote().future()) for actor in self.actors]
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(asyncio.gather(*calls, return_exceptions=True), SHUTDOWN_S)
        for actor in self.actors:
            ray.kill(actor)
