"""The way of the weights from the policy's ranks to the engines: who sends, to whom, in which order."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.pool.engine_group import EngineGroup
from skyrl_train.cluster.ranks.rank_actor import Reach
from skyrl_train.cluster.ranks.worker_group import WorkerGroup
from skyrl_train.ranks import ParallelRanks
from skyrl_train.weight_sync.control import ControlMessage
from skyrl_train.weight_sync.send_report import SendReport

CLOSE_SENDER_S = 5.0
REACHES: dict[str, Reach] = {"vllm_nccl": "first_stage", "cuda_ipc": "every_stage"}
"""Where a backend needs the tensors of all stages; elsewhere each stage sends its own."""


@dataclass(frozen=True, slots=True)
class SyncResult:
    """One weight sync."""

    num_bytes: int
    seconds: float
    """From pausing the engines to their resuming."""
    begin_s: float
    """Of it, pausing and opening the update."""
    finish_s: float
    """Of it, comparing digests, closing the update and resuming."""
    reports: tuple[SendReport, ...]
    """One of each pipeline stage."""


class WeightWay:
    """Each pipeline stage's owner sends its own tensors to every engine that is up.

    Stock vLLM knows one sender only: there the first stage's owner sends the tensors of all stages. Through CUDA IPC
    each engine's worker is fed by the rank on its own GPU.
    """

    def __init__(
        self,
        group: WorkerGroup,
        ranks: Sequence[ParallelRanks],
        engines: EngineGroup,
        backend: str,
        bucket_bytes: int,
        timeout_s: float,
    ) -> None:
        """Args: ranks: their places in the layout; timeout_s of each wait of a sender for the engines."""
        self._group, self._ranks, self._engines = group, ranks, engines
        self._reach: Reach = REACHES.get(backend, "own_stage")
        self._settings = backend, bucket_bytes, timeout_s
        self._connected_at: int | None = None
        """`num_changes` of the engines that the senders are connected with; None where they must be connected anew."""
        self._feeders: list[int] = []
        """Ranks that share a GPU with an engine and send to it, where each engine has a sender of its own."""

    def forget(self) -> None:
        """The ranks' processes are new ones: the next `send` connects them."""
        self._connected_at = None

    async def connect(self) -> None:
        """Raises: RemoteFailed."""
        members = self._engines.members
        await members.drop_lost()  # senders would wait for those until the deadline
        if not members.actors:
            raise RemoteFailed("no engine is up that weights could be sent to")
        num_changes, self._connected_at = members.num_changes, None
        backend, bucket_bytes, timeout_s = self._settings
        way = backend, bucket_bytes, members.num_workers, timeout_s
        if self._reach == "every_stage":
            await self._connect_beside_engines(way, num_changes)
        else:
            for rank in self._senders:
                name = self._group.calls.names[rank]
                info = await self._group.one(rank, "open_sender", members.actors, *way, name, members.nodes)
                await self._meet(info, [rank], num_changes)
        self._connected_at = num_changes

    async def _connect_beside_engines(self, way: tuple[Any, ...], num_changes: int) -> None:
        """A rank feeds the engine's worker on its own GPU, if that one is up. The first speaks for all, who send the
        same."""
        members, everybody = self._engines.members, range(len(self._ranks))
        self._feeders = sorted(members.shared_ranks) or list(everybody)
        closes = (self._group.one(rank, "close") for rank in everybody if rank not in self._feeders)
        await asyncio.gather(*closes)
        speakers = [members.actors] + [{}] * (len(self._feeders) - 1)
        pairs = zip(self._feeders, speakers, strict=True)
        opens = (self._group.one(rank, "open_sender", spoken_to, *way, "policy") for rank, spoken_to in pairs)
        infos = await asyncio.gather(*opens)
        addresses: dict[str, str] = {}
        for info in infos:
            addresses |= info["addresses"]
        await self._meet(infos[0] | {"addresses": addresses}, self._feeders, num_changes)

    async def _meet(self, info: ControlMessage, senders: Sequence[int], num_changes: int) -> None:
        """Every engine joins these senders, which look after the engines' calls meanwhile.

        Args: num_changes of the engines when the senders were told how many to wait for.
        """
        if self._engines.members.num_changes != num_changes:
            # The senders would wait for one whose loss a request noticed.
            raise RemoteFailed("an engine was lost while the weight sync was connected")
        joining = self._engines.join_sender(info)
        connects = (self._group.one(rank, "connect_sender", joining) for rank in senders)
        await asyncio.gather(self._engines.joined(joining), *connects)

    @property
    def _senders(self) -> list[int]:
        """The ranks that send."""
        if self._reach == "every_stage":
            return self._feeders
        owners = [rank for rank, place in enumerate(self._ranks) if place.owns_stage]
        return owners if self._reach == "own_stage" else [rank for rank in owners if self._ranks[rank].pp_rank == 0]

    async def send(self, dtype_name: str, policy_version: int) -> SyncResult:
        """Move the policy's weights into the running engines and have them served as this version.

        The way is opened anew where an engine was lost or replaced since, or the last sync broke off.
        Raises: RemoteFailed; the engines then stay paused, and none of them waits for the senders any more.
        """
        try:
            if self._connected_at != self._engines.members.num_changes:
                await self.connect()
            return await self._send(dtype_name, policy_version)
        except BaseException:
            self._connected_at = None
            # A rank that is lost has no sender left; one that still waits for somebody closes its own later, and before
            # it opens another. The error must not wait for either.
            closes = (self._group.one(rank, "close_sender") for rank in self._senders)
            with contextlib.suppress(RemoteFailed, TimeoutError):
                await asyncio.wait_for(asyncio.gather(*closes), CLOSE_SENDER_S)
            raise

    async def _send(self, dtype_name: str, policy_version: int) -> SyncResult:
        engines, started = self._engines, time.perf_counter()
        await engines.begin_weight_update()
        begun = time.perf_counter()
        reports: list[SendReport] = []
        # One stage after another: engines that took two senders' broadcasts in different order would wait for each
        # other. It is also the order of the layers, in which vLLM loads them without holding back parts of one.
        each_stage = self._reach == "own_stage"
        for stage in range(1 + max(place.pp_rank for place in self._ranks) if each_stage else 1):
            ranks = [rank for rank, place in enumerate(self._ranks) if place.pp_rank == stage or not each_stage]
            refs = [self._group.actors[rank].send_weights.remote(dtype_name, self._reach) for rank in ranks]
            results = await self._group.calls.gather("send weights", refs, ranks)
            reports += [report for report in results if report is not None]
        if self._reach == "every_stage":
            assert all(report.digests == reports[0].digests for report in reports), "ranks sent different weights"
            reports = reports[:1]
        digests: dict[str, int] = {}
        for report in reports:
            digests |= report.digests
        assert len(digests) == sum(len(report.digests) for report in reports), "two stages sent the same tensor"
        sent = time.perf_counter()
        await engines.finish_weight_update(policy_version, digests)
        await engines.resume()
        ended = time.perf_counter()
        num_bytes = sum(report.num_bytes for report in reports)
        return SyncResult(num_bytes, ended - started, begun - started, ended - sent, tuple(reports))
