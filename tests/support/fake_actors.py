"""Actors of a few lines, behind the real groups that call them: they answer at once, or die in a chosen call."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
from ray.exceptions import RayActorError, RayTaskError

from skyrl_train.cluster.placement import Slot
from skyrl_train.cluster.pool.engine_process import StartedEngine
from skyrl_train.cluster.pool.pool import EnginePool
from skyrl_train.cluster.pool.replica import EngineReplica
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.cluster.ranks.worker_group import WorkerGroup
from skyrl_train.engines.protocol import EngineFacts
from skyrl_train.ranks import LOOPBACK, Moved, ParallelRanks, Rendezvous
from skyrl_train.types import Generation
from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.send_report import SendReport
from tests.support.settings import engine_settings

GIB = 2**30
SYNC = engine_settings("model", "served", "float32", 64, weight_sync_backend="shm", weight_sync_timeout_s=0.2).generator


def ref(answer: Any) -> Any:
    """A reference to this answer, to what was raised instead of one, or to a future answer."""
    if isinstance(answer, Future):
        return SimpleNamespace(future=lambda: answer)
    future: Future[Any] = Future()
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
    return SimpleNamespace(future=lambda: future)


def task_error(cause: Exception) -> RayTaskError:
    """As Ray raises it: of the cause's class too."""
    return RayTaskError("method", "a stack", cause).as_instanceof_cause()


class Actor:
    """Every method can be called. `answers` says what some return or raise; the others return None."""

    def __init__(self, **answers: Any) -> None:
        self.answers, self.is_alive, self.called = answers, True, list[str]()
        self.dies_in: str | None = None

    def __getattr__(self, method: str) -> Any:
        return SimpleNamespace(remote=partial(self._answer, method))

    def _answer(self, method: str, *args: Any, **kwargs: Any) -> Any:
        if method == "call" and (args[0] in self.answers or "call" not in self.answers):
            method, *args = args  # type: ignore[assignment]
        self.called.append(method)
        self.is_alive &= method != self.dies_in
        if not self.is_alive:
            return ref(RayActorError())
        answer = self.answers.get(method)
        try:
            return ref(answer(*args, **kwargs) if callable(answer) else answer)
        except Exception as error:
            return ref(task_error(error))


class FakeEngine(Actor):
    """Answers each prompt with its reverse, under the version of the last whole update."""

    def __init__(self, **answers: Any) -> None:
        super().__init__(
            memory=[{"reserved": GIB, "free": 3.0 * GIB}],
            start=StartedEngine(EngineFacts(1), "node", ()),
            finish_and_resume=self._finish,
            prompt_logprobs=lambda prompts: [[0.0] * len(prompt) for prompt in prompts],
            **answers,
        )
        self.policy_version = 0
        self.num_answered = 0
        self.dies_after_answers: int | None = None
        """So many answers, also none, are all that it gives."""

    def _finish(self, policy_version: int, digests: dict[str, int]) -> None:
        self.policy_version = policy_version

    @property
    def stream(self) -> Any:
        return SimpleNamespace(options=lambda num_returns: SimpleNamespace(remote=self._stream))

    async def _stream(self, method: str, requests: Any) -> AsyncIterator[Awaitable[Any]]:
        for index, token_ids, _ in requests:
            self._die_if_due()
            self.num_answered += 1
            answer = Generation(token_ids[::-1], [], "", "stop", policy_version=self.policy_version)
            yield asyncio.sleep(0, [(index, answer)])
        self._die_if_due()

    def _die_if_due(self) -> None:
        self.is_alive &= self.num_answered != self.dies_after_answers
        if not self.is_alive:
            raise RayActorError


class ExportsNothing:
    """The worker of a rank that has no model."""

    ranks = None

    def __init__(self, rendezvous: Rendezvous) -> None: ...

    def export_specs(self, dtype: Any) -> list[Any]:
        return []


class FakeRank(Actor):
    """A rank of a policy; it sends the engines nothing, but notices dead ones."""

    def __init__(self, pp_rank: int = 0) -> None:
        super().__init__(
            find_place=("node", 7, ""),
            listen=lambda on_one_node: (LOOPBACK if on_one_node else "host", 1),
            build=ParallelRanks(0, pp_rank, 0, 0, 1, True),
            open_sender=self._open,
            prepare_export=None,
            connect_sender=None,
            send_weights=self._send,
            close=self._close,
            memory={"reserved": 2.0 * GIB, "free": 5.0 * GIB},
            offload=self._move("leaves"),
            reload=self._move("enters"),
        )
        self.moves: list[str] = []
        self.opened: dict[str, dict[str, FakeEngine]] = {}
        """Purpose -> the engines of its sender."""
        self.num_sends, self.sent = 0, 1

    @property
    def engines(self) -> dict[str, FakeEngine]:
        """Those of training."""
        return self.opened.get("training", {})

    @property
    def is_open(self) -> bool:
        return "training" in self.opened

    def _move(self, verb: str) -> Callable[..., Moved]:
        def move(*parts: str) -> Moved:
            self.moves.append(" ".join((verb, *parts)))
            return Moved(0, 0.0)

        return move

    def _open(self, purpose: str, engines: dict[str, FakeEngine], *way: Any) -> dict[str, Any]:
        self.opened[purpose] = dict(engines)
        return {"sender": "policy-0", "addresses": {id(self): "socket"}}

    def _close(self, *purposes: str) -> None:
        for purpose in purposes or [*self.opened]:
            self.opened.pop(purpose, None)

    def _send(self, purpose: str, settings: Any) -> SendReport | None:
        if purpose not in self.opened:
            return None
        self.num_sends += 1
        for name, engine in self.opened[purpose].items():
            if isinstance(engine.call.remote("update_weights", {}).future().exception(), RayActorError):
                raise WeightSyncError(f"{name} died while it took in the weights")
        report = SendReport(8, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, {"w": self.sent})
        return report if self.opened[purpose] else report.short()


async def ended(replica: EngineReplica) -> None:
    """There is no process to end."""


def engine_pool(
    monkeypatch: pytest.MonkeyPatch,
    *actors: Any,
    num_engines: int | None = None,
    max_restarts: int = 0,
    ranks_each: int = 0,
) -> EnginePool:
    """Started engines; further actors are the replacements, in the order in which they are asked for.

    Args: ranks_each: policy ranks whose devices each engine shares.
    """
    waiting = iter(actors)
    monkeypatch.setattr(EngineReplica, "new_actor", lambda replica: setattr(replica, "actor", next(waiting)))
    monkeypatch.setattr(EngineReplica, "end", ended)
    num_engines = len(actors) if num_engines is None else num_engines
    each = [engine_settings("model", "served", "float32", 64, weight_sync_timeout_s=0.2) for _ in range(num_engines)]
    shares = [tuple(range(n * ranks_each, (n + 1) * ranks_each)) for n in range(num_engines)]
    slots = [Slot(None, 1.0, 0, some) for some in shares]  # type: ignore[arg-type]
    group = EnginePool(slots, each, "logs", 0.2, max_restarts=max_restarts)
    for replica in group.replicas:
        replica.started = StartedEngine(EngineFacts(1), "node", ())
    return group


async def policy_group(monkeypatch: pytest.MonkeyPatch, *ranks: FakeRank) -> PolicyGroup:
    """A started policy on this node, whose killed processes have ended at once."""
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    monkeypatch.setattr("skyrl_train.cluster.process.wait_ended", lambda pids, timeout_s: [])
    monkeypatch.setattr("ray.kill", lambda actor: None)
    monkeypatch.setattr(WorkerGroup, "spawn", lambda group: setattr(group, "actors", list(ranks)))
    slots = [SimpleNamespace(strategy=None)] * len(ranks)
    policy = PolicyGroup(WorkerGroup("policy", slots, "logs", 1.0))  # type: ignore[arg-type]
    await policy.start({})
    return policy
