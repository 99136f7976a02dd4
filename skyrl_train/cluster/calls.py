"""Waits for several actors at once, with a deadline and errors that name the process and its log."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.exceptions import RayActorError, RayTaskError

from skyrl_train.cluster.process import host

Futures = set[asyncio.Future[Any]]
DEATH_S = 5.0
"""Seconds for Ray to report a dead process: others notice sooner that their connections to it are closed."""


class RemoteFailed(RuntimeError):
    """A process of the run raised, died or did not answer in time."""


@dataclass(frozen=True, slots=True)
class Calls:
    """Names, deadline and logs of a group of processes."""

    names: tuple[str, ...]
    timeout_s: float
    log_folder: str

    async def gather(
        self, what: str, refs: Sequence[Any], members: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Results of `refs`, one per process (all of the group, or `members`).

        Args: what: the task, for errors ("send weights"); timeout_s: None for the group's deadline.
        Raises: RemoteFailed for the first failure, at once: the others may wait in a collective for the failed process.
            An error that the death of another process may have caused waits up to DEATH_S for it, which is then raised.
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        names = [self.names[member] for member in (range(len(refs)) if members is None else members)]
        futures = [asyncio.wrap_future(ref.future()) for ref in refs]
        try:
            done, pending = await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
            if any(_may_have_lost_a_peer(future.exception()) for future in done):
                done, pending = await _wait_for_death(done, pending)
        finally:
            for future in futures:
                future.cancel()
        # Of all futures, because asyncio complains about errors that are never retrieved.
        errors = [future.exception() if future in done else None for future in futures]
        failures = [(name, error) for name, error in zip(names, errors, strict=True) if error is not None]
        if failures:  # a death causes the errors of others
            name, error = min(failures, key=lambda failure: not _has_died(failure[1]))
            raise RemoteFailed(self.describe(name, what, error)) from error
        if pending:
            late = ", ".join(name for name, future in zip(names, futures, strict=True) if future in pending)
            raise RemoteFailed(f"{late} did not {what} within {timeout_s:g} s (logs: {self.log_folder})")
        return [future.result() for future in futures]

    def describe(self, name: str, what: str, error: BaseException) -> str:
        log = f"log: {self.log_folder}/{name}.log"
        if isinstance(error, RayTaskError):
            if isinstance(error.cause, RayActorError):
                return f"{name} failed to {what}: a process that it called crashed or was killed ({log})"
            return f"{name} failed to {what}: {type(error.cause).__name__}: {error.cause} ({log})"
        if isinstance(error, RayActorError):
            node = _other_node(error.actor_id)
            process = "its process" if node is None else f"node {node} failed, or the process there"
            return f"{name} died when asked to {what}: {process} crashed or was killed ({log})"
        return f"{name} failed to {what}: {error} ({log})"


def _may_have_lost_a_peer(error: BaseException | None) -> bool:
    """Whether it is of the kind that gloo and NCCL raise when another process has died."""
    return isinstance(error, RayTaskError) and isinstance(error.cause, RuntimeError)


def _has_died(error: BaseException | None) -> bool:
    return error is not None and not isinstance(error, RayTaskError)


async def _wait_for_death(done: Futures, pending: Futures) -> tuple[Futures, Futures]:
    """Wait until a process has died, at most DEATH_S. Returns: the futures that are done, and the others."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(DEATH_S):
            while pending and not any(_has_died(future.exception()) for future in done):
                ended, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_EXCEPTION)
                done |= ended
    return done, pending


def _other_node(actor_id: str | None) -> str | None:
    """Address of a process's node; None for this node and if unknown."""
    try:
        actor = {} if actor_id is None else ray._private.state.actors(actor_id)
    except Exception:  # the head node may be what died
        return None
    address = actor.get("Address", {}).get("IPAddress")
    return address if address and address != host() else None


async def results_of(calls: Iterable[Awaitable[Any]]) -> list[Any]:
    """Result of each call, or the RemoteFailed that it raised."""
    results = await asyncio.gather(*calls, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException) and not isinstance(result, RemoteFailed):
            raise result
    return results
