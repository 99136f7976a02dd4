"""The senders of a weight sync: which ranks send to which engines, and in which order."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.weight_sync.channels.table import transport
from skyrl_train.weight_sync.control import ControlMessage
from skyrl_train.weight_sync.send_report import SendReport
from skyrl_train.weight_sync.settings import SyncSettings

CLOSE_SENDER_S = 5.0


class Senders:
    """Each pipeline stage's owner sends its own tensors to every engine that is up.

    Stock vLLM knows one sender only: there the first stage's owner sends the tensors of all stages. Through CUDA IPC
    each engine's worker is fed by the rank on its own GPU.
    """

    def __init__(self, policy: PolicyGroup, engines: EnginePool, settings: SyncSettings) -> None:
        self._policy, self._engines, self._settings = policy, engines, settings
        self._scope = transport(settings.weight_sync_backend).scope
        self._connected: tuple[int, int] | None = None
        """The processes that are connected: `num_starts` of the policy and `num_changes` of the engines."""
        self._feeders: list[int] = []
        """Ranks that share a GPU with an engine and send to it, where each engine has a sender of its own."""

    @property
    def are_connected(self) -> bool:
        """False where an engine or the policy was replaced since, or the last sync failed."""
        return self._connected == (self._policy.num_starts, self._engines.num_changes)

    async def connect(self) -> None:
        """Raises: RemoteFailed."""
        engines = self._engines
        await engines.drop_dead()  # senders would wait for those until the deadline
        if not engines.actors:
            raise RemoteFailed("no engine is up that weights could be sent to")
        num_changes, self._connected = engines.num_changes, None
        if self._scope == "every_stage":
            await self._connect_beside_engines(num_changes)
        else:
            for rank in self._senders:
                name = self._policy.group.calls.names[rank]
                await self._meet(await self._open(rank, engines.actors, name), [rank], num_changes)
        self._connected = self._policy.num_starts, num_changes

    async def _open(self, rank: int, engines: dict[str, object], name: str) -> ControlMessage:
        pool = self._engines
        nodes = None if self._scope == "every_stage" else pool.nodes
        return await self._policy.group.one(rank, "open_sender", engines, self._settings, pool.num_workers, name, nodes)

    async def _connect_beside_engines(self, num_changes: int) -> None:
        """A rank feeds the engine's worker on its own GPU, if that one is up. The first speaks for all, who send the
        same."""
        group, pool, everybody = self._policy.group, self._engines, range(len(self._policy.ranks))
        self._feeders = sorted(pool.shared_ranks) or list(everybody)
        await asyncio.gather(*(group.one(rank, "close") for rank in everybody if rank not in self._feeders))
        spoken_to = [pool.actors] + [{}] * (len(self._feeders) - 1)
        opens = (self._open(rank, engines, "policy") for rank, engines in zip(self._feeders, spoken_to, strict=True))
        infos = await asyncio.gather(*opens)
        addresses: dict[str, str] = {}
        for info in infos:
            addresses |= info["addresses"]
        await self._meet(infos[0] | {"addresses": addresses}, self._feeders, num_changes)

    async def _meet(self, info: ControlMessage, senders: Sequence[int], num_changes: int) -> None:
        """Every engine joins these senders, which look after the engines' calls meanwhile.

        Args: num_changes of the engines when the senders were told how many to wait for.
        """
        if self._engines.num_changes != num_changes:
            # The senders would wait for one whose loss a request noticed.
            raise RemoteFailed("an engine was lost while the weight sync was connected")
        joining = self._engines.join_sender(info)
        connects = (self._policy.group.one(rank, "connect_sender", joining) for rank in senders)
        await asyncio.gather(self._engines.joined(joining), *connects)

    @property
    def _senders(self) -> list[int]:
        """The ranks that send."""
        if self._scope == "every_stage":
            return self._feeders
        ranks = self._policy.ranks
        owners = [rank for rank, place in enumerate(ranks) if place.owns_stage]
        return owners if self._scope == "own_stage" else [rank for rank in owners if ranks[rank].pp_rank == 0]

    async def send(self) -> list[SendReport]:
        """Have all ranks export, and the senders send; engines must expect an update.

        Returns: one report of each sender, or one for all if each of them sent the whole model.
        """
        group, places = self._policy.group, self._policy.ranks
        reports: list[SendReport] = []
        # One stage after another: engines that took two senders' broadcasts in different order would wait for each
        # other. It is also the order of the layers, in which vLLM loads them without holding back parts of one.
        each_stage = self._scope == "own_stage"
        for stage in range(1 + max(place.pp_rank for place in places) if each_stage else 1):
            ranks = [rank for rank, place in enumerate(places) if place.pp_rank == stage or not each_stage]
            refs = [group.actors[rank].call.remote("send_weights", self._settings) for rank in ranks]
            results = await group.calls.gather("send weights", refs, ranks)
            reports += [report for report in results if report is not None]
        if self._scope == "every_stage":
            assert all(report.digests == reports[0].digests for report in reports), "ranks sent different weights"
            return reports[:1]
        return reports

    async def disconnect(self) -> None:
        """After a failure: no engine waits for a sender any more, and the next sync connects others."""
        self._connected = None
        # A rank that is lost has no sender left; one that still waits for somebody closes its own later, and before it
        # opens another. The error must not wait for either.
        closes = (self._policy.group.one(rank, "close") for rank in self._senders)
        with contextlib.suppress(RemoteFailed, TimeoutError):
            await asyncio.wait_for(asyncio.gather(*closes), CLOSE_SENDER_S)
