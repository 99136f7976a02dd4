"""Senders of a weight sync: which ranks send to which engines, and in which order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.weight_sync.channels.table import transport
from skyrl_train.weight_sync.control import ControlMessage
from skyrl_train.weight_sync.send_report import SendReport

CLOSE_SENDER_S = 5.0


class Senders:
    """Each pipeline stage's owner sends its own tensors to every engine that is up.

    Stock vLLM accepts one sender: there the first stage's owner sends the tensors of all stages. Through CUDA IPC each
    engine's worker receives from the rank on its own GPU.
    """

    def __init__(self, policy: PolicyGroup, engines: EnginePool, settings: GeneratorConfig, purpose: str) -> None:
        """Args: purpose: of the engines, under which each rank keeps its sender."""
        self._policy, self._engines, self._settings, self._purpose = policy, engines, settings, purpose
        self._scope = transport(settings.weight_sync_backend).scope
        self._connected: tuple[int, int] | None = None
        """`num_starts` of the policy and `num_changes` of the engines, of the processes that are connected."""
        self._beside_engines: list[int] = []
        """Ranks that share a GPU with an engine and send to it, with scope every_stage."""

    @property
    def are_connected(self) -> bool:
        """False if an engine or the policy was replaced since, or the last sync failed."""
        return self._connected == (self._policy.num_starts, self._engines.num_changes)

    async def connect(self) -> None:
        """Raises: RemoteFailed."""
        engines = self._engines
        await engines.drop_dead()  # senders would wait for those until the deadline
        if not engines.actors:
            raise RemoteFailed("no engine is up that weights could be sent to")
        num_changes, self._connected = engines.num_changes, None
        await self._policy.group.all("prepare_export", self._settings)
        if self._scope == "every_stage":
            await self._connect_beside_engines(num_changes)
        else:
            for rank in self._senders:
                name = self._policy.group.calls.names[rank]
                await self._join(await self._open(rank, engines.actors, name, engines.nodes), [rank], num_changes)
        self._connected = self._policy.num_starts, num_changes

    async def _open(self, rank: int, engines: dict[str, object], name: str, nodes: set[str] | None) -> ControlMessage:
        workers = self._engines.num_workers
        args = self._purpose, engines, self._settings, workers, name, nodes
        return await self._policy.group.one(rank, "open_sender", *args)

    async def _connect_beside_engines(self, num_changes: int) -> None:
        """Have each rank send to the engine's worker on its own GPU, if that one is up. All send the same, so the first
        posts the messages for all.
        """
        group, pool, everybody = self._policy.group, self._engines, range(len(self._policy.ranks))
        self._beside_engines = sorted(pool.shared_ranks) or list(everybody)
        away = (rank for rank in everybody if rank not in self._beside_engines)
        await asyncio.gather(*(group.one(rank, "close", self._purpose) for rank in away))
        first, *others = self._beside_engines
        opens = [self._open(first, pool.actors, "policy", None), *(self._open(r, {}, "policy", None) for r in others)]
        infos = await asyncio.gather(*opens)
        addresses: dict[str, str] = {}
        for info in infos:
            addresses |= info["addresses"]
        await self._join(infos[0] | {"addresses": addresses}, self._beside_engines, num_changes)

    async def _join(self, info: ControlMessage, senders: Sequence[int], num_changes: int) -> None:
        """Have every engine join these senders, which check the engines' calls during that time.
        Args: num_changes: of the engines when the senders were opened.
        """
        if self._engines.num_changes != num_changes:
            # The senders would wait for an engine whose death a request has noticed.
            raise RemoteFailed("an engine died while connecting the weight sync")
        joining = self._engines.join_sender(info)
        connects = (self._policy.group.one(rank, "connect_sender", self._purpose, joining) for rank in senders)
        await asyncio.gather(self._engines.joined(joining), *connects)

    @property
    def _senders(self) -> list[int]:
        if self._scope == "every_stage":
            return self._beside_engines
        ranks = self._policy.ranks
        owners = [rank for rank, place in enumerate(ranks) if place.owns_stage]
        return owners if self._scope == "own_stage" else [rank for rank in owners if ranks[rank].pp_rank == 0]

    async def send(self) -> list[SendReport]:
        """Have all ranks export, and the senders send; engines must expect an update.
        Returns: one report of each sender, or one for all if each of them sent the whole model.
        """
        group, places = self._policy.group, self._policy.ranks
        reports: list[SendReport] = []
        # One stage after another: engines that receive two senders' broadcasts in different order would deadlock. It is
        # also the order of the layers, in which vLLM loads them without holding back parts of one.
        each_stage = self._scope == "own_stage"
        for stage in range(1 + max(place.pp_rank for place in places) if each_stage else 1):
            ranks = [rank for rank, place in enumerate(places) if place.pp_rank == stage or not each_stage]
            refs = [group.actors[rank].call.remote("send_weights", self._purpose, self._settings) for rank in ranks]
            results = await group.calls.gather("send weights", refs, ranks)
            reports += [report for report in results if report is not None]
        if self._scope == "every_stage":
            first, *others = reports
            same = first.short().digests if others else {}
            assert all(report.digests == same for report in others), "ranks sent different weights"
            return [first]
        return reports

    async def disconnect(self) -> None:
        """Close the senders, which releases engines that wait for one after a failure; the next sync opens others."""
        self._connected = None
        # A dead rank has no sender left; one that still waits closes its own later, before it opens another. The error
        # must not wait for either.
        closes = (self._policy.group.one(rank, "close", self._purpose) for rank in self._senders)
        with contextlib.suppress(RemoteFailed, TimeoutError):
            await asyncio.wait_for(asyncio.gather(*closes), CLOSE_SENDER_S)
