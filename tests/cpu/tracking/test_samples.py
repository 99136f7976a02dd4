"""Samples in files: with all that is needed to judge them, whatever an environment reports."""

from __future__ import annotations

import io
import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from rich.console import Console

from skyrl_train.tracking.samples import SampleLog
from skyrl_train.tracking.sinks import Tracker
from skyrl_train.tracking.transcripts import TranscriptLog, reference_of, transcript_of
from skyrl_train.types import Group, Prompt, Sample, final_reward


def sample(reward: float, **more: Any) -> Sample:
    spoken = [{"role": "user", "content": "1+1="}, {"role": "assistant", "content": "2"}]
    mask = torch.tensor([False, False, True, True])
    ids = torch.tensor([1, 4, 5, 2])
    made = Sample(ids, mask, torch.zeros(4), 2, final_reward(4, reward), "stop", 1, 3, transcript=spoken)
    return made if not more else Sample(**{name: getattr(made, name) for name in Sample.__slots__} | more)


def group(uid: str, *samples: Sample) -> Group:
    row = {"reward_spec": {"ground_truth": "2"}, "difficulty": 1}
    return Group(Prompt(uid, [], "addition", row, "sums"), samples)


class Tables:
    """Remembers tables."""

    def __init__(self) -> None:
        self.tables: list[tuple[int, str, int]] = []

    def log(self, step: int, metrics: Any) -> None:
        """Not needed."""

    def log_samples(self, step: int, name: str, rows: Any) -> None:
        self.tables.append((step, name, len(rows)))

    def close(self) -> None:
        """Not needed."""


@pytest.fixture
def world(tmp_path: Path) -> tuple[SampleLog, Tables, Console]:
    console, tables = Console(file=io.StringIO(), width=80), Tables()
    log = TranscriptLog(tmp_path / "samples.jsonl", console)
    words = {1: "<bos>", 4: "1+1=", 5: "2", 2: "<eos>"}
    made = SampleLog(
        log, tmp_path / "evaluations", lambda ids: "".join(words[i] for i in ids.tolist()), Tracker([tables])
    )
    return made, tables, console


def rows_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_evaluation_keeps_every_sample_as_lines_and_as_a_table(
    tmp_path: Path, world: tuple[SampleLog, Tables, Console]
):
    log, tables, _ = world
    metrics = {"turns": np.int64(2), "loss": float("nan"), "who": Path("judge")}
    groups = [group("7", sample(1.0), sample(0.0, env_metrics=metrics)), group("8", sample(0.5))]
    lines, table = log.evaluation(12, groups, parquet=True)
    assert lines == tmp_path / "evaluations/global_step_12.jsonl"
    first, second, third = rows_of(lines)
    assert first == {
        "step": 12,
        "prompt": "1+1=",
        "response": "2",
        "reward": 1.0,
        "stop_reason": "stop",
        "uid": "7",
        "conversation": 0,
        "data_source": "sums",
        "env_class": "addition",
        "reference": "2",
        "turns": 1,
        "num_tokens": 2,
        "policy_version": 3,
        "env_metrics": {},
        "named_rewards": {},
        "text": "<bos>1+1=2<eos>",
    }
    assert second["env_metrics"] == {"turns": 2, "loss": None, "who": "judge"} and third["uid"] == "8"
    columns = pq.read_table(table).to_pylist()
    assert [row["reward"] for row in columns] == [1.0, 0.0, 0.5]
    assert json.loads(columns[1]["env_metrics"]) == second["env_metrics"] and columns[0]["reference"] == '"2"'
    assert tables.tables == [(12, "samples/eval", 3)] and len(list(lines.parent.iterdir())) == 2


def test_training_writes_whole_groups_up_to_a_number_and_shows_one_of_each_prompt(
    tmp_path: Path, world: tuple[SampleLog, Tables, Console]
):
    log, tables, console = world
    groups = [group(uid, sample(1.0), sample(0.0)) for uid in "abc"]
    log.training(1, groups, 3)
    assert [row["uid"] for row in rows_of(tmp_path / "samples.jsonl")] == ["a", "a", "b"]
    log.training(2, groups, -1)
    assert len(rows_of(tmp_path / "samples.jsonl")) == 9
    assert console.file.getvalue().count("sample of step 2") == 2  # type: ignore[attr-defined]
    assert tables.tables == [(1, "samples/train", 3), (2, "samples/train", 6)]


def test_turns_that_are_samples_name_their_conversation(tmp_path: Path, world: tuple[SampleLog, Tables, Console]):
    turn, last = sample(0.0, ends_conversation=False), sample(1.0)
    groups = [group("a", turn, turn, last, last, turn, last), group("b", turn, last)]
    log, _, _ = world
    log.training(1, groups, -1)
    named = [(row["uid"], row["conversation"]) for row in rows_of(tmp_path / "samples.jsonl")]
    assert named == [*[("a", 0)] * 3, ("a", 1), *[("a", 2)] * 2, *[("b", 0)] * 2]
    _, table = log.evaluation(1, groups, parquet=True)
    assert pq.read_table(table).column("conversation").to_pylist() == [number for _, number in named]


def test_a_full_disk_costs_the_samples_of_the_evaluation_alone(
    tmp_path: Path, world: tuple[SampleLog, Tables, Console], caplog: pytest.LogCaptureFixture
):
    (tmp_path / "evaluations").touch()
    assert world[0].evaluation(3, [group("1", sample(1.0))]) == []
    assert "the samples of the evaluation of step 3 cannot be written" in caplog.text


@pytest.mark.parametrize(
    ("row", "reference"),
    [({"reward_spec": {"ground_truth": 4}, "answer": 5}, 4), ({"answer": "x"}, "x"), ({"reward_spec": None}, None)],
)
def test_the_reference_answer_is_found_where_rows_have_it(row: dict[str, Any], reference: Any):
    assert reference_of(row) == reference


def test_tool_calls_are_shown_as_json_with_or_without_content():
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": {"a": "é"}}}
    shown = '[{"name": "add", "arguments": {"a": "é"}}]'
    called = {"role": "assistant", "tool_calls": [call]}
    answer = {"role": "assistant", "content": "2"}
    question = [{"role": "user", "content": "1+1="}, {**called, "content": "Hm."}, {"role": "tool", "content": "2"}]
    written = transcript_of(1, sample(1.0, transcript=[*question, answer]))
    assert written.prompt == f"user: 1+1=\nassistant: Hm.\n{shown}\ntool: 2"
    for content in ({}, {"content": None}):
        assert transcript_of(1, sample(1.0, transcript=[{**called, **content}, answer])).prompt == shown


def test_content_in_parts_and_calls_of_any_kind_are_shown_as_json(
    tmp_path: Path, world: tuple[SampleLog, Tables, Console]
):
    parts = {"role": "user", "content": [{"type": "text", "text": "1+1="}]}
    called = {"role": "assistant", "content": "Hm.", "tool_calls": ["add"]}
    log, _, _ = world
    log.training(1, [group("a", sample(1.0, transcript=[parts, called]))], -1)
    (row,) = rows_of(tmp_path / "samples.jsonl")
    assert (row["prompt"], row["response"]) == ('[{"type": "text", "text": "1+1="}]', 'Hm.\n["add"]')


def test_what_an_environment_reports_never_ends_the_run(tmp_path: Path, world: tuple[SampleLog, Tables, Console]):
    log, tables, _ = world
    lock = threading.Lock()
    reported = sample(1.0, env_metrics={"query": "half \ud83d", "client": lock})
    log.training(1, [group("a", reported)], -1)
    (file,) = log.evaluation(1, [group("a", reported)])
    for (row,) in (rows_of(tmp_path / "samples.jsonl"), rows_of(file)):
        assert row["env_metrics"] == {"query": "half \ud83d", "client": str(lock)}
    assert len(tables.tables) == 2
