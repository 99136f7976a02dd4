"""What a rank returns of a sync: all digests, or in short if another rank posts the messages and sends the same."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.cluster.ranks import rank as rank_module
from skyrl_train.cluster.ranks.rank import Rank
from skyrl_train.weight_sync.send_report import SendReport
from tests.support.fake_actors import SYNC, ExportsNothing

REPORT = SendReport(8, 1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, {"a": 1, "b": 2})


class FakeSender:
    def __init__(self) -> None:
        self.init_info: dict[str, Any] = {}

    def send(self, specs: Any, tensors: Any) -> SendReport:
        return REPORT

    def close(self) -> None: ...


class Worker(ExportsNothing):
    def export(self, dtype: Any) -> Any:
        return iter(())


def test_only_a_rank_that_posts_messages_reports_every_digest(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(rank_module, "open_sender", lambda backend, end: FakeSender())
    monkeypatch.setattr("ray.get_runtime_context", lambda: SimpleNamespace(get_node_id=lambda: "node"))
    settings, rank = replace(SYNC, weight_sync_backend="shm"), Rank()
    rank._worker = Worker(None)  # type: ignore[arg-type]
    for engines, expected in (({"engine-0": None}, REPORT), ({}, REPORT.short()), ({"engine-0": None}, REPORT)):
        rank.open_sender("training", engines, settings, 1, "policy", {"node"})
        assert rank.send_weights("training", settings) == expected
    assert rank.send_weights("evaluation", settings) is None


def test_reports_in_short_are_equal_if_the_same_was_sent():
    assert REPORT.short() == replace(REPORT, digests={"b": 2, "a": 1}).short()
    assert REPORT.short() != replace(REPORT, digests={"a": 1, "b": 3}).short()
    assert REPORT.short() != replace(REPORT, digests={"a": 1, "c": 2}).short()
