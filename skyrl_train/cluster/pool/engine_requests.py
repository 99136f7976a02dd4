"""The requests of rollouts: dealt to the engines that serve, and kept from failing where none is left that could."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

from skyrl_train.cluster.background import Background
from skyrl_train.cluster.pool.engine_members import EngineMembers
from skyrl_train.rollout.router import Router


class EngineRequests:
    """The router over the engines' places, and who is called when it finds none of them up."""

    def __init__(self, members: EngineMembers, background: Background) -> None:
        self._members, self._background = members, background
        engines = [partial(place.generate, lose=members.lose) for place in members.places]
        self.router = Router(engines, self._begin_rescue)
        members.when_one_is_lost(self.router.remove)
        self._restore: Callable[[], Awaitable[None]] | None = None
        self._rescue_task: asyncio.Task[None] | None = None

    @property
    def are_held(self) -> bool:
        """Whether one waits because no engine serves."""
        return self.router.is_holding

    def when_all_are_lost(self, restore: Callable[[], Awaitable[None]]) -> None:
        """Have `restore` called when a request finds no engine left: it is to send a replacement weights
        (`EngineMembers.admit_replacements`, a whole update, `EngineGroup.resume`)."""
        self._restore = restore

    def _begin_rescue(self) -> None:
        if self._rescue_task is None or self._rescue_task.done():
            self._rescue_task = self._background.begin(self._rescue())

    async def _rescue(self) -> None:
        """No engine is left to generate with: have one restored, or fail what is asked of them."""
        try:
            while self.router.is_holding:
                if self._restore is None:
                    raise self._members.none_is_left()
                await self._restore()
        except Exception as error:
            self.router.fail(error)
