"""Whether the workers of an engine received and loaded what was sent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_train.weight_sync.control import WeightSyncError
from skyrl_train.weight_sync.digest import compare


def check_reports(reports: Sequence[Mapping[str, Any]], sent_digests: Mapping[str, int], receiver: str) -> None:
    """Args: reports: `skyrl_sync_report` of every worker; receiver: its name in errors.

    Raises: WeightSyncError naming tensors that differ, are missing or unknown to the engine, or incomplete layers.
    """
    for report in reports:
        compare(sent_digests, report["digests"])
        if report["faults"]:
            raise WeightSyncError(f"the {receiver} could not load all weights: " + "; ".join(report["faults"]))
