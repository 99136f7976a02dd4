"""What vLLM's worker reports about an update."""

from __future__ import annotations

from skyrl_train.engines.vllm.worker.transfer import SkyRLWeightTransfer


class HidesFaults:
    """An update that calls its model complete once it is finished, as vLLM's layerwise reload does."""

    def __init__(self) -> None:
        self.missing = ["layer 0 lacks a weight"]

    def faults(self) -> list[str]:
        return self.missing

    def finish(self) -> None:
        self.missing = []


def test_what_is_missing_is_reported_before_and_after_the_update_is_finished():
    """The engine asks for both at once."""
    transfer = object.__new__(SkyRLWeightTransfer)
    transfer._update, transfer._digests, transfer._faults = HidesFaults(), {"a": 1}, None  # type: ignore[assignment]
    whole = {"digests": {"a": 1}, "faults": ["layer 0 lacks a weight"]}
    assert transfer.report() == whole
    transfer.finish_weight_update()
    assert transfer.report() == whole
