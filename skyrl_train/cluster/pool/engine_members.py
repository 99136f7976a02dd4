"""Which engines are up: one that is lost is dropped, and another is started in its place."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Any

from skyrl_train.cluster.background import Background
from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.engine_place import EnginePlace
from skyrl_train.engines.settings import RemoteEngineSettings

log = logging.getLogger(__name__)


class EngineMembers:
    """The engines' places, and who is in them."""

    def __init__(self, places: Sequence[EnginePlace], background: Background) -> None:
        """Args: background is where replacements are started."""
        self.places = tuple(places)
        self._background = background
        self._tell_lost: Callable[[int], None] = lambda index: None
        self.num_changes = 0
        """Engines lost and come back so far: senders of weights have to be connected anew when it has grown."""

    @property
    def up(self) -> list[EnginePlace]:
        return [place for place in self.places if place.is_up]

    @property
    def actors(self) -> dict[str, Any]:
        """name -> actor of each engine that is up."""
        return {place.name: place.actor for place in self.up}

    @property
    def num_workers(self) -> int:
        """Of the engines that are up."""
        return sum(place.num_workers for place in self.up)

    @property
    def nodes(self) -> set[str] | None:
        """Nodes of the engines that are up; None where they are servers, which may be outside of the cluster."""
        if any(isinstance(place.settings, RemoteEngineSettings) for place in self.up):
            return None
        return {place.started.node_id for place in self.up if place.started is not None}

    @property
    def shared_ranks(self) -> set[int]:
        """Policy ranks whose devices the engines that are up use, where they have none of their own."""
        return {rank for place in self.up for rank in place.slot.shares}

    @property
    def has_replacement(self) -> bool:
        """Whether the start of an engine in the place of a lost one has ended, well or not: `admit_replacements`."""
        return any(place.replacement is not None and place.replacement.done() for place in self.places)

    def when_one_is_lost(self, tell: Callable[[int], None]) -> None:
        """Have `tell` called with the number of its place, before a replacement is started."""
        self._tell_lost = tell

    def lose(self, place: EnginePlace, reason: str) -> None:
        """Go on without this engine, which was up, and have another started in its place."""
        place.is_up, place.lost_because = False, reason
        self.num_changes += 1
        self._tell_lost(place.index)
        restarts = "it is replaced" if place.restarts < place.max_restarts else "it is not replaced any more"
        log.error("%s is lost: %s. %d of %d engines go on; %s", place.name, reason, len(self.up), len(self.places),
                  restarts)  # fmt: skip
        place.replacement = self._background.begin(place.replace())

    async def drop_lost(self) -> list[str]:
        """Ask every engine whether it lives, and go on without those that do not. Returns: their names."""
        asked = self.up
        answers = await asyncio.gather(*(place.lives() for place in asked))
        lost = [place for place, lives in zip(asked, answers, strict=True) if place.is_up and not lives]
        for place in lost:
            self.lose(place, f"it does not answer, its process crashed, was killed or hangs (log: {place.log_path})")
        return [place.name for place in lost]

    async def admit_replacements(self) -> None:
        """Call also those engines that have been started in the place of lost ones; where none is left, wait for one.

        They hold the weights of the checkpoint, and get requests when a sync has ended with `EngineGroup.resume`.
        Raises: RemoteFailed if no engine is left and none could be started.
        """
        while True:
            failures = [error for place in self.places if (error := self._admit(place)) is not None]
            for error in failures:
                log.error("%s", error)
            if self.up:
                return
            starting = [place.replacement for place in self.places if place.replacement is not None]
            if not starting:
                raise self.none_is_left() from (failures[0] if failures else None)
            await asyncio.wait(starting, return_when=asyncio.FIRST_COMPLETED)

    def _admit(self, place: EnginePlace) -> BaseException | None:
        """Count a replacement that has started as up. Returns: why it could not be started."""
        if place.replacement is None or not place.replacement.done():
            return None
        task, place.replacement = place.replacement, None
        if task.cancelled():
            return None
        if task.exception() is None:
            place.is_up = True
            self.num_changes += 1
        return task.exception()

    def none_is_left(self) -> RemoteFailed:
        """What is to be raised then."""
        reasons = "; ".join(f"{place.name} is lost: {place.lost_because}" for place in self.places)
        return RemoteFailed(
            f"no engine is left (generator.max_engine_restarts={self.places[0].max_restarts}): {reasons}"
        )
