"""Waits for several actors at once, with a deadline and errors that name the process and its log."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ray.exceptions import RayActorError, RayTaskError


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
        """
        timeout_s = self.timeout_s if timeout_s is None else timeout_s
        names = [self.names[member] for member in (range(len(refs)) if members is None else members)]
        futures = [asyncio.wrap_future(ref.future()) for ref in refs]
        try:
            done, pending = await asyncio.wait(futures, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        finally:
            for future in futures:
                future.cancel()
        # Of all futures, because asyncio complains about errors that are never retrieved.
        errors = [future.exception() if future in done else None for future in futures]
        for name, error in zip(names, errors, strict=True):
            if error is not None:
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
            return f"{name} died when asked to {what}: its process crashed or was killed ({log})"
        return f"{name} failed to {what}: {error} ({log})"
