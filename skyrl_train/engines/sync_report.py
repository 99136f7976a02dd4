"""What an engine received in one weight update, and whether it is what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.digest import compare


@dataclass(frozen=True, slots=True)
class SyncReport:
    """What an engine received in one weight update."""

    policy_version: int
    num_tensors: int
    num_parameters: int
    """Parameters of the engine's model, each of them loaded once."""
    digests: dict[str, int]
    """name -> digest of the bytes handed to the engine's loader."""


def checked_report(
    policy_version: int, workers: Sequence[Mapping[str, Any]], sent_digests: Mapping[str, int], who: str
) -> SyncReport:
    """Args: workers are the answers of every worker's `skyrl_sync_report`; who received it, for an error's text.

    Raises: WeightSyncError naming the tensors that differ, are missing, are unknown to the engine, or the layers that
        got too little.
    """
    for worker in workers:
        compare(sent_digests, worker["digests"])
        if worker["faults"]:
            raise WeightSyncError(f"the {who} could not load all weights: " + "; ".join(worker["faults"]))
    digests = dict(workers[0]["digests"])
    return SyncReport(policy_version, len(digests), workers[0]["num_parameters"], digests)
