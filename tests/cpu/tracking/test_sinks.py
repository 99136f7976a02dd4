"""Sinks, console block, progress bar and transcripts."""

import errno
import io
import json
import logging
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from rich.console import Console
from rich.progress import Progress
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from skyrl_train.checks.rl import check
from skyrl_train.config import ConfigError, load_config
from skyrl_train.tracking import format as fmt
from skyrl_train.tracking.console import ConsoleSink, lossy_stdout
from skyrl_train.tracking.jsonl import JsonLinesWriter, read_json_lines
from skyrl_train.tracking.progress import ConsoleProgress
from skyrl_train.tracking.sinks import JsonLinesSink, TensorBoardSink, Tracker, build_tracker, has_wandb_key
from skyrl_train.tracking.transcripts import Transcript, TranscriptLog, conversation, shortened


def tracker_of(names: list[str], folder: Path, **options: int) -> Tracker:
    names = ",".join(names)
    return build_tracker(load_config([f"trainer.logger=[{names}]", "trainer.run_name=run"]), folder, **options)


STEP_METRICS = {
    "reward/avg_raw_reward": 0.625,
    "reward/avg_pass_at_8": 0.9,
    "generate/avg_num_tokens": 3.1,
    "generate/max_num_tokens": 4.0,
    "policy/policy_kl": math.nan,
    "policy/policy_lr": 3e-4,
    "policy/loss_metrics/clip_ratio": 0.0375,
    "timing/step": 1.9,
    "timing/generate": 0.8,
    "timing/policy_train": 1.0,
    "timing/convert_to_training_input": 0.001,
    "perf/generate_tokens_per_s": 12345.0,
}


class ListSink:
    """Keeps what it is given; fails while told to."""

    def __init__(self) -> None:
        self.steps: list[int] = []
        self.fails = False
        self.num_closed = 0

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        if self.fails:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.steps.append(step)

    def close(self) -> None:
        self.num_closed += 1


class FullDisk(io.RawIOBase):
    """A file that takes `room` bytes and then fails like a full disk."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.content = b""

    def write(self, data: bytes) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = bytes(data)[: self.room]
        self.room -= len(taken)
        self.content += taken
        return len(taken)


def printed(*steps: tuple[int, dict[str, float]], width: int = 80, total_steps: int | None = None) -> str:
    console = Console(file=io.StringIO(), width=width)
    sink = ConsoleSink(console, total_steps=total_steps)
    for step, metrics in steps:
        sink.log(step, metrics)
    return console.file.getvalue()


def test_failing_sink_is_named_once_and_the_others_continue(caplog: pytest.LogCaptureFixture):
    failing, healthy = ListSink(), ListSink()
    failing.fails = True
    tracker = Tracker([failing, healthy])
    with caplog.at_level(logging.WARNING):
        for step in range(3):
            tracker.log(step, {})
    assert healthy.steps == [0, 1, 2]
    assert [record.message for record in caplog.records] == [
        "ListSink failed, training continues without it: OSError: [Errno 28] No space left on device"
    ]


def test_sink_that_failed_is_tried_again():
    sink = ListSink()
    tracker = Tracker([sink])
    sink.fails = True
    tracker.log(0, {})
    sink.fails = False
    tracker.log(1, {})
    assert sink.steps == [1]


def test_tracker_closes_each_sink_once():
    sinks = [ListSink(), ListSink()]
    tracker = Tracker(sinks)
    tracker.close()
    tracker.close()
    assert [sink.num_closed for sink in sinks] == [1, 1]


def test_interrupt_passes_through_the_tracker():
    class Interrupted(ListSink):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        Tracker([Interrupted()]).log(0, {})


def test_json_lines_hold_the_step_and_are_readable_before_close(tmp_path: Path):
    sink = JsonLinesSink(tmp_path / "metrics.jsonl")
    sink.log(3, {"a": 1.5, "b": math.nan, "c": math.inf})
    (row,) = (json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert row.pop("trainer/unix_time_s") > 1.7e9
    assert row == {"trainer/global_step": 3, "a": 1.5, "b": None, "c": None}


def test_a_line_that_a_killed_process_left_half_written_costs_no_later_one(tmp_path: Path):
    (tmp_path / "rows.jsonl").write_text('{"step": 1}\n{"step": 2, "rew')
    for step in (3, 4):
        writer = JsonLinesWriter(tmp_path / "rows.jsonl")
        writer.write({"step": step})
        writer.close()
    assert [row["step"] for row in read_json_lines(tmp_path / "rows.jsonl")] == [1, 3, 4]


def test_full_disk_delays_json_lines_and_loses_none(tmp_path: Path):
    writer = JsonLinesWriter(tmp_path / "rows.jsonl")
    disk = FullDisk(room=12)
    writer._file.close()
    writer._file = disk
    writer.write({"a": 1})
    for value in (2, 3):
        with pytest.raises(OSError, match="No space left"):
            writer.write({"a": value})
    disk.room = 1000
    writer.write({"a": 4})
    assert disk.content == b'{"a": 1}\n{"a": 2}\n{"a": 3}\n{"a": 4}\n'


def test_line_cut_short_by_a_kill_is_left_out_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    (tmp_path / "rows.jsonl").write_bytes(b'{"a": 1}\n{"a": 2')
    assert read_json_lines(tmp_path / "rows.jsonl") == [{"a": 1}]
    assert "line 2" in caplog.text


def test_tensorboard_files_hold_every_metric_before_close(tmp_path: Path):
    sink = TensorBoardSink(tmp_path, steps_done=0)
    sink.log(1, {"reward/avg_raw_reward": 0.5})
    sink.log(2, {"reward/avg_raw_reward": 0.75, "policy/policy_kl": 0.25})
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward/avg_raw_reward")] == [(1, 0.5), (2, 0.75)]
    assert [(e.step, e.value) for e in events.Scalars("policy/policy_kl")] == [(2, 0.25)]
    sink.close()


def test_tracker_writes_every_named_sink_below_the_run_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    tracker = tracker_of(["console", "jsonl", "tensorboard"], tmp_path, total_steps=7)
    tracker.log(1, STEP_METRICS)
    tracker.close()
    assert "step 1/7" in capsys.readouterr().out
    assert len(read_json_lines(tmp_path / "metrics.jsonl")) == 1
    assert list((tmp_path / "tensorboard").glob("events.out.tfevents.*"))


def test_tensorboard_forgets_the_steps_that_a_run_goes_back_behind(tmp_path: Path):
    for steps_done, value in ((0, 1.0), (2, 2.0)):
        tracker = tracker_of(["tensorboard"], tmp_path, steps_done=steps_done)
        for step in range(steps_done + 1, 5 - steps_done // 2):
            tracker.log(step, {"reward/avg_raw_reward": value})
        tracker.close()
    events = EventAccumulator(str(tmp_path / "tensorboard")).Reload()
    found = [(one.step, one.value) for one in events.Scalars("reward/avg_raw_reward")]
    assert found == [(1, 1.0), (2, 1.0), (3, 2.0)]


def test_every_sink_name_can_be_built(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("skyrl_train.tracking.sinks.WandbSink", lambda *args: ListSink())
    tracker_of(["console", "jsonl", "tensorboard", "wandb"], tmp_path).close()


def test_wandb_key_is_found_in_the_environment_and_in_netrc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    for name in ("WANDB_API_KEY", "WANDB_BASE_URL"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine example.org login user password word\n")
    assert not has_wandb_key()
    (tmp_path / "netrc").write_text("machine api.wandb.ai login user password word\n")
    assert has_wandb_key()
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    monkeypatch.setenv("WANDB_API_KEY", "key")
    assert has_wandb_key()


def test_wandb_without_a_key_writes_an_offline_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    for name in ("WANDB_API_KEY", "WANDB_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "none"))
    tracker = tracker_of(["wandb"], tmp_path)
    tracker.log(1, {"reward/avg_raw_reward": 0.5})
    tracker.close()
    assert list((tmp_path / "wandb").glob("offline-run-*/run-*.wandb"))


def test_wandb_keeps_what_an_earlier_step_still_owed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tracker = tracker_of(["wandb"], tmp_path)
    tracker.log(3, {"policy/loss": 0.625})
    tracker.log(2, {"eval/all/avg_score": 0.375})
    tracker.close()
    (file,) = (tmp_path / "wandb").glob("offline-run-*/run-*.wandb")
    assert b"0.625" in file.read_bytes() and b"0.375" in file.read_bytes()  # protobuf with numbers as text


def test_samples_are_a_table_at_wandb_and_nothing_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    wandb = pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    tables: list[Any] = []
    make = wandb.Table
    monkeypatch.setattr(wandb, "Table", lambda **given: tables.append(given) or make(**given))
    tracker = tracker_of(["jsonl", "wandb"], tmp_path)
    tracker.log_samples(1, "samples/eval", [])
    tracker.log_samples(1, "samples/eval", [{"uid": "0", "reward": 0.5, "env_metrics": {"turns": 1}}] * 1001)
    tracker.log(1, {"reward/avg_raw_reward": 0.5})
    tracker.close()
    (table,) = tables
    assert table["columns"] == ["uid", "reward", "env_metrics"] and len(table["data"]) == 1000
    assert table["data"][0] == ["0", 0.5, '{"turns": 1}']
    assert read_json_lines(tmp_path / "metrics.jsonl")[0]["reward/avg_raw_reward"] == 0.5


class OwnSink(ListSink):
    """A user's sink."""

    built: ClassVar[list[tuple[Any, ...]]] = []

    def __init__(self, *arguments: Any) -> None:
        super().__init__()
        self.built.append(arguments)


class NoSink:
    """Lacks `close`."""

    def __init__(self, *arguments: Any) -> None: ...

    def log(self, step: int, metrics: Any) -> None: ...


def test_an_own_class_is_a_sink_built_from_folder_configuration_and_steps(tmp_path: Path):
    OwnSink.built.clear()
    tracker = tracker_of([f'"{__name__}:OwnSink"'], tmp_path, steps_done=3)
    ((run_dir, config, steps_done),) = OwnSink.built
    assert (run_dir, config.trainer.run_name, steps_done) == (tmp_path, "run", 3)
    tracker.close()


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        (f"{__name__}:NoSink", r"it has no close\. A sink has log\(step, metrics\) and close\(\)"),
        (f"{__name__}:tracker_of", r"it must be a class that is built from \(run_dir, config, steps_done\)"),
        (f"{__name__}:OwnSnk", "did you mean OwnSink"),
        ("mlflow", r"trainer.logger is .*mlflow.*It must be one of console, .*, or your own module:Class"),
    ],
)
def test_a_wrong_sink_is_refused_before_anything_starts(name: str, problem: str):
    given = [*(f"trainer.{key}" for key in ("policy.model.path=m", "prepare=null")), f'trainer.logger=["{name}"]']
    with pytest.raises(ConfigError, match=problem):
        check(load_config([*given, "data.train_data=[rows.jsonl]"]), None, files=False)


def test_a_resumed_run_is_the_same_run_at_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    ids = []
    for steps_done in (0, 3, 0):
        tracker = tracker_of(["wandb"], tmp_path, steps_done=steps_done)
        ids.append((tmp_path / "wandb_run_id").read_text())
        tracker.close()
    assert ids[0] == ids[1] != ids[2]


def test_console_block_shows_the_step_where_there_is_no_terminal():
    text = printed((12, STEP_METRICS), total_steps=40)
    assert "\x1b" not in text
    for shown in (
        "step 12/40 · 1.90 s",
        "reward      0.6250",
        "pass@8      0.9000",
        "tokens       3.1/4",
        "kl             nan",
    ):
        assert shown in text
    for shown in ("lr         3.0e-04", "clipped      3.8 %", "generate    800 ms", "gen tok/s    12.3k"):
        assert shown in text
    assert max(map(len, text.splitlines())) <= 80


def test_console_block_leaves_out_what_is_missing_and_what_takes_no_time():
    text = printed((1, STEP_METRICS))
    for hidden in ("held-out", "entropy", "mfu", "prepare", "None"):
        assert hidden not in text


def test_console_block_of_an_evaluation_alone_is_short():
    text = printed((0, {"eval/all/avg_score": 0.41, "timing/eval": 1.2}))
    assert [line.split() for line in text.splitlines()[1:]] == [["held-out", "0.4100"], ["evaluate", "1.20", "s"]]


def test_metrics_keep_their_columns_from_step_to_step():
    first = printed((1, STEP_METRICS)).splitlines()
    second = printed((2, {**STEP_METRICS, "reward/avg_raw_reward": 0.0, "eval/all/avg_score": 1.0})).splitlines()
    assert first[1].index("pass@8") == second[1].index("pass@8")


def test_narrow_terminal_still_gets_whole_cells():
    assert all(len(line) <= 40 and "…" not in line for line in printed((1, STEP_METRICS), width=40).splitlines())


@dataclass(frozen=True)
class Done:
    loss_mask: torch.Tensor
    reward: float


def test_progress_bar_is_silent_without_a_terminal():
    console = Console(file=io.StringIO())
    progress = ConsoleProgress(console)
    progress.start(2)
    progress.advance([Done(torch.ones(3, dtype=torch.bool), 1.0)])
    progress.stop()
    assert console.file.getvalue() == ""


def test_progress_bar_shows_samples_tokens_per_second_and_mean_reward(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(Progress, "start", lambda self: None)  # no thread that draws
    now = iter([0.0, 2.0, 4.0])
    progress = ConsoleProgress(Console(file=io.StringIO(), force_terminal=True), clock=lambda: next(now))
    progress.start(2)
    progress.advance([Done(torch.tensor([False, True, True]), 1.0)])
    progress.advance([Done(torch.tensor([False, True, True]), 0.0)])
    assert progress._bar is not None
    (task,) = progress._bar.tasks
    assert (task.completed, task.total, task.fields["status"]) == (2, 2, "1 tok/s · reward 0.5000")
    progress.stop()


def test_transcripts_are_written_whole_and_a_few_are_shown_with_their_brackets(tmp_path: Path):
    console = Console(file=io.StringIO(), width=80)
    log = TranscriptLog(tmp_path / "samples.jsonl", console, num_shown=1)
    log.log(
        [
            Transcript(5, "solve [bold]1+1[/bold]", "[/nonsense] 2", 1.0, "stop"),
            Transcript(5, "p", "r" * 5000, 0.0, "length"),
        ]
    )
    rows = read_json_lines(tmp_path / "samples.jsonl")
    assert [(row["step"], len(row["response"]), row["stop_reason"]) for row in rows] == [
        (5, 13, "stop"),
        (5, 5000, "length"),
    ]
    text = console.file.getvalue()
    assert "solve [bold]1+1[/bold]" in text and "[/nonsense] 2" in text and "rrr" not in text


def test_full_disk_does_not_stop_transcripts_from_being_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    console = Console(file=io.StringIO())
    log = TranscriptLog(tmp_path / "samples.jsonl", console)
    log._writer._file.close()
    log._writer._file = FullDisk(room=0)
    for step in (1, 2):
        log.log([Transcript(step, "prompt", "response", 0.0, "stop")])
    assert console.file.getvalue().count("response") == 2
    assert len(caplog.records) == 1


def test_conversation_names_roles_only_where_there_are_several():
    assert conversation([{"role": "user", "content": "1+1="}]) == "1+1="
    assert (
        conversation([{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}])
        == "user: a\nassistant: b"
    )


def test_shortened_text_keeps_both_ends():
    assert shortened("abcdefghij", 4) == "ab … 6 characters … ij"
    assert shortened("abcd", 4) == "abcd"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.8125, "0.8125"), (12.345, "12.35"), (1024, "1,024"), (3e-6, "3.0e-06"), (-3e-6, "-3e-06"), (4.0, "4"),
     (math.nan, "nan"), (2.4e7, "2.4e+07"), (0.0, "0"), (math.inf, "inf")],
)  # fmt: skip
def test_numbers_fit_their_column(value: float, text: str):
    assert fmt.number(value) == text
    assert len(text) <= 7


def test_times_and_throughputs_have_units():
    assert [fmt.seconds(s) for s in (0.0354, 1.84, 24.12, 1250)] == ["35 ms", "1.84 s", "24.1 s", "1,250 s"]
    assert [fmt.duration(s) for s in (24, 125, 11220)] == ["24 s", "2 min 05 s", "3 h 07 min"]
    assert [fmt.compact(v) for v in (8123, 12345, 123456, 4.56e6)] == ["8,123", "12.3k", "123.5k", "4.56M"]


def test_wandb_is_not_given_the_command_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("wandb")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setattr(sys, "argv", ["program", "generator.http_api_key=the-secret"])
    tracker_of(["wandb"], tmp_path).close()
    assert sys.argv[1:] == ["generator.http_api_key=the-secret"]
    written = [file for file in (tmp_path / "wandb").rglob("*") if file.is_file()]
    assert written and not any(b"the-secret" in file.read_bytes() for file in written)


def broken(kind: str) -> Any:
    """A stream as stdout is one when its reader has ended, its disk is full, or its encoding is not UTF-8."""
    if kind == "pipe":
        reader, writer = os.pipe()
        os.close(reader)
        return os.fdopen(writer, "w", buffering=1)
    if kind == "disk":
        return open("/dev/full", "w", buffering=1)
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)


@pytest.mark.parametrize("kind", ["pipe", "disk", "encoding"])
def test_what_cannot_be_printed_is_lost_and_the_run_goes_on(
    kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    stream = broken(kind)
    monkeypatch.setattr(sys, "stdout", stream)
    with lossy_stdout():
        for _ in range(2):
            Console().print("reward ↑")
            print("plain", flush=True)
    assert caplog.text.count("the output cannot be printed, the run continues without it") == (kind != "encoding")
    if kind == "encoding":
        assert stream.buffer.getvalue() == b"reward \\u2191\nplain\n" * 2
    else:
        with pytest.raises(OSError):
            stream.close()


def test_a_sink_that_exits_is_a_failed_one(caplog: pytest.LogCaptureFixture):
    class Exits(ListSink):
        def log(self, step: int, metrics: Mapping[str, float]) -> None:
            sys.exit(1)

    healthy = ListSink()
    Tracker([Exits(), healthy]).log(1, {"a": 1.0})
    assert healthy.steps == [1] and "Exits failed, training continues without it: SystemExit: 1" in caplog.text


def test_tensorboard_recovers_from_a_full_disk(tmp_path: Path):
    sink = TensorBoardSink(tmp_path, steps_done=0)
    written = sink._writer._async_writer._worker._record_writer._writer  # type: ignore[attr-defined]

    def full(data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    written.write = full
    tracker = Tracker([sink])
    for step in (1, 2, 3):
        tracker.log(step, {"a": float(step)})
    tracker.close()
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [event.step for event in events.Scalars("a")][-2:] == [2, 3]
