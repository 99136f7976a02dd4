"""The engines of a teacher: their weights never change, and each scores a part of the samples."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.pool import EnginePool

log = logging.getLogger(__name__)


class TeacherEngines:
    def __init__(self, pool: EnginePool) -> None:
        self._pool = pool

    async def start(self) -> None:
        await self._pool.start()

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Per prompt, like `Engine.prompt_logprobs`. What an engine that dies was scoring is scored again by the others
        or its replacement. Raises: RemoteFailed if a living engine fails, or none is left.
        """
        while True:
            before = self._pool.num_changes
            try:
                if self._pool.has_replacement or not self._pool.up:
                    await self._pool.admit_replacements()
                    await self._pool.resume()  # the weights of the checkpoint are the teacher's
                    before = self._pool.num_changes
                return await self._score(prompts)
            except RemoteFailed as error:
                dead = await self._pool.drop_failed(error, before)
                log.warning("scoring with a teacher failed: %s died (%s); retrying without it", dead, error)

    async def _score(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        engines = self._pool.up
        order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
        parts = [order[first :: len(engines)] for first in range(len(engines))]
        calls = [
            engine.call("score samples", "prompt_logprobs", [prompts[index] for index in part])
            for engine, part in zip(engines, parts, strict=True)
        ]
        found: dict[int, list[float]] = {}
        for part, scores in zip(parts, await asyncio.gather(*calls), strict=True):
            found |= zip(part, scores, strict=True)
        for engine in engines:
            engine.count_sync()
        return [found[index] for index in range(len(prompts))]

    async def shutdown(self) -> None:
        await self._pool.shutdown()
