"""The report of whole, short, poor and interrupted runs, and the table of metric names."""

import ast
import json
import math
import re
import struct
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.tracking.names import TABLE, metric_units
from skyrl_train.tracking.report.charts import charts_for, moving_mean
from skyrl_train.tracking.report.figure import COLUMNS, grid_positions
from skyrl_train.tracking.report.history import History, load_history, summarize
from skyrl_train.tracking.report.report import NUM_SAMPLES, chosen_samples, main, write_report
from skyrl_train.tracking.report.timeline import TRAINER, bars, shown_steps
from skyrl_train.tracking.run_dir import create_run_dir, read_record, write_record
from skyrl_train.tracking.transcripts import transcript_of
from skyrl_train.types import Sample

ROOT = Path(__file__).parents[3]
START_S = 1_780_000_000.0
VOID_TAGS = {"meta", "link", "br", "img"}

Row = dict[str, float | None]


class Page(HTMLParser):
    """Checks nesting and collects the links and texts of a document."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.open: list[str] = []
        self.links: list[str] = []
        self.texts: list[str] = []
        self.num_charts = 0
        self.feed(path.read_text())
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.links += [value or "" for name, value in attrs if name in ("href", "src", "xlink:href")]
        self.num_charts += tag == "svg"
        if tag not in VOID_TAGS:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def training_row(step: int, time_s: float) -> Row:
    """What a step of the quickstart logs, in size and shape."""
    score = 0.95 - 0.55 * math.exp(-step / 14)
    return {
        "trainer/global_step": step,
        "trainer/unix_time_s": time_s,
        "reward/avg_raw_reward": score - 0.05,
        "reward/avg_pass_at_8": min(1.0, score + 0.1),
        "generate/avg_num_tokens": 3.1 + 0.05 * math.sin(step),
        "generate/max_num_tokens": 4.0,
        "policy/policy_entropy": 0.6 * math.exp(-step / 12) + 0.05,
        "policy/policy_kl": 0.05 * (1 - math.exp(-step / 15)),
        "policy/grad_norm": 0.5 + 0.3 * math.sin(3 * step) ** 2,
        "policy/loss_metrics/clip_ratio": 0.03,
        "policy/rollout_train_logprobs_abs_diff_mean": 4e-7,
        "policy/rollout_train_logprobs_abs_diff_max": 5e-6,
        "timing/generate": 0.55,
        "timing/fwd_logprobs_values_reward": 0.2,
        "timing/policy_train": 0.6,
        "timing/sync_weights": 0.07,
        "timing/step": 1.45,
        "perf/generate_tokens_per_s": 5900.0,
        "perf/train_tokens_per_s": 16500.0,
    }


def run_rows(num_steps: int, eval_interval: int = 5) -> list[Row]:
    rows: list[Row] = [{"trainer/global_step": 0, "trainer/unix_time_s": START_S + 10, "eval/all/avg_score": 0.41}]
    for step in range(1, num_steps + 1):
        row = training_row(step, START_S + 10 + 1.5 * step)
        if step % eval_interval == 0 or step == num_steps:
            row["eval/all/avg_score"] = 0.93
        rows.append(row)
    return rows


def reward_rows(num_steps: int) -> list[Row]:
    """Rows that make one chart, for tests of the rest of the report."""
    return [
        {
            "trainer/global_step": step,
            "trainer/unix_time_s": START_S + 10 + 1.5 * step,
            "reward/avg_raw_reward": 0.25 * step,
        }
        for step in range(1, num_steps + 1)
    ]


def make_run(path: Path, rows: list[Row], status: str = "finished") -> Path:
    changes = {"trainer.train_batch_size": 128, "data.train_data": ["<train>.jsonl"]}
    run_dir = create_run_dir(path, "quickstart", "", changes)
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    run_dir.finish(status)
    end_s = START_S + 125
    write_record(path, {**read_record(path), "started_unix_s": START_S, "ended_unix_s": end_s})
    return path


def png_size(path: Path) -> tuple[int, int]:
    header = path.read_bytes()[:24]
    assert header[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", header[16:24])
    return width, height


def test_steps_behind_which_a_run_went_back_are_not_counted(tmp_path: Path):
    """Killed in step 8 with a checkpoint of step 5, and ended early."""
    again = [{**row, "reward/avg_raw_reward": 7.0} for row in reward_rows(7)[5:]]
    run = make_run(tmp_path / "run", [*reward_rows(8), *again], "interrupted")
    series = load_history(run / "metrics.jsonl").series("reward/avg_raw_reward")
    assert series == {1: 0.25, 2: 0.5, 3: 0.75, 4: 1.0, 5: 1.25, 6: 7.0, 7: 7.0}


def test_a_step_that_was_trained_twice_shows_the_later_time_and_an_evaluation_after_resuming_is_added(tmp_path: Path):
    rows = [
        {"trainer/global_step": 1, "timing/step": 1.0, "policy/grad_norm": 7.0},
        {"trainer/global_step": 1, "timing/step": 2.0, "reward/avg_raw_reward": 0.5},
        {"trainer/global_step": 1, "timing/eval": 3.0, "eval/all/avg_score": 0.25},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    row = dict(load_history(tmp_path / "metrics.jsonl").rows[1])
    assert row.keys() == {*rows[1], *rows[2]} and row["timing/step"] == 2.0


def test_samples_behind_which_a_run_went_back_are_not_shown(tmp_path: Path):
    rows = [{"step": step, "reward": reward} for step, reward in ((1, 0), (4, 0), (7, 0), (5, 1))]
    (tmp_path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert [row["step"] for row in chosen_samples(tmp_path / "samples.jsonl")] == [1, 4, 5]


def test_the_time_of_a_run_that_went_on_is_counted_from_its_first_start(tmp_path: Path):
    run = make_run(tmp_path / "run", reward_rows(3))
    write_record(run, {**read_record(run), "earlier": [{"started_unix_s": START_S - 100}, {"started_unix_s": START_S}]})
    assert summarize(run, load_history(run / "metrics.jsonl")).wall_s == 225.0


def test_report_tells_name_score_steps_time_versions_and_changes_and_needs_no_other_file(tmp_path: Path):
    run = make_run(tmp_path / "run", run_rows(30))
    html_path, png_path = write_report(run)
    assert (html_path, png_path) == (run / "report.html", run / "report.png")
    page = Page(html_path)
    text = " ".join(page.texts)
    assert "held-out score 0.4100 → 0.9300 · 30 steps · 2 min 05 s" in text
    for shown in ("quickstart", f"torch {torch.__version__}", "trainer.train_batch_size", "128", "['<train>.jsonl']"):
        assert shown in text
    assert page.num_charts == 9
    assert all(link.startswith("#") for link in page.links)
    assert not re.search(r"@import|url\((?!#)|<script", html_path.read_text())
    width, height = png_size(png_path)
    assert width > 1000 and height > 1000
    assert not list(run.glob(".*draft"))


@pytest.mark.parametrize(
    "rows",
    [
        run_rows(0),
        run_rows(1),
        run_rows(1)[1:],
        run_rows(150),
        [{"trainer/global_step": 1, "reward/avg_raw_reward": 0.0}],
        [{"trainer/global_step": 1, "timing/step": 0.0}],
        [{**training_row(step, START_S), "policy/grad_norm": None} for step in (1, 2)],
        [{**training_row(1, START_S), "policy/rollout_train_logprobs_abs_diff_mean": 0.0}],
    ],
    ids=["evaluation only", "one step", "no evaluation", "many steps", "reward only", "no time", "nulls", "zeros"],
)
@pytest.mark.filterwarnings("error")
def test_report_is_written_whatever_the_run_measured(tmp_path: Path, rows: list[Row]):
    html_path, png_path = write_report(make_run(tmp_path / "run", rows))
    assert Page(html_path).num_charts == len(charts_for(load_history(tmp_path / "run" / "metrics.jsonl"))) > 0
    png_size(png_path)


def test_a_run_that_diverged_shows_nan_as_its_last_values(tmp_path: Path):
    values: list[tuple[float | None, ...]] = [(5.0, 26.05), (2.0, None), (None, None), (None, None)]
    rows: list[Row] = [
        {"trainer/global_step": step, "sft/loss": loss, "policy/grad_norm": norm, "perf/mfu": None}
        for step, (loss, norm) in enumerate(values, 1)
    ]
    run = make_run(tmp_path / "run", rows)
    history = load_history(run / "metrics.jsonl")
    assert history.series("sft/loss") == {1: 5.0, 2: 2.0}, "charts have finite values alone"
    html_path, _ = write_report(run)
    text = " ".join(" ".join(Page(html_path).texts).split())
    assert "training loss 5 → nan · 4 steps" in text
    for metric in ("sft/loss nats/token 5 nan 2 5", "policy/grad_norm 26.05 nan 26.05 26.05"):
        assert metric in text
    assert "perf/mfu fraction nan nan nan nan" in text and "MFU, mean" not in text


def test_interrupted_run_says_so_and_its_cut_line_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    run = make_run(tmp_path / "run", reward_rows(4), status="interrupted")
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"trainer/global_step": 5, "rew')
    html_path, _ = write_report(run)
    assert "4 steps · 2 min 05 s · interrupted" in " ".join(Page(html_path).texts)
    assert "skipping truncated line 5" in caplog.text


def test_run_that_wrote_no_end_lasts_until_its_last_line(tmp_path: Path):
    run = make_run(tmp_path / "run", run_rows(4))
    record = {key: value for key, value in read_record(run).items() if key != "ended_unix_s"}
    write_record(run, {**record, "status": "running"})
    summary = summarize(run, load_history(run / "metrics.jsonl"))
    assert (summary.status, summary.wall_s) == ("unfinished", 16.0)


def test_run_without_evaluation_is_judged_by_its_training_reward(tmp_path: Path):
    run = make_run(tmp_path / "run", reward_rows(2))
    summary = summarize(run, load_history(run / "metrics.jsonl"))
    assert summary.line().startswith("training reward 0.2500 → 0.5000 · 2 steps")


def test_folder_without_run_json_is_reported_under_its_own_name(tmp_path: Path):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(reward_rows(1)[0]) + "\n")
    html_path, _ = write_report(tmp_path)
    assert tmp_path.name in " ".join(Page(html_path).texts)


def test_lines_of_one_step_are_merged(tmp_path: Path):
    lines = [
        {"trainer/global_step": 1, "a": 3.0},
        {"trainer/global_step": 2, "a": 1.0},
        {"trainer/global_step": 2, "b": 2.0},
    ]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    history = load_history(tmp_path / "metrics.jsonl")
    assert history.series("a") == {1: 3.0, 2: 1.0}
    assert history.series("b") == {2: 2.0}


@pytest.mark.parametrize(("content", "message"), [(None, "does not exist"), ("", "contains no step")])
def test_report_without_steps_is_one_clear_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str | None, message: str
):
    if content is not None:
        (tmp_path / "metrics.jsonl").write_text(content)
    assert main([str(tmp_path)]) == 1
    assert message in capsys.readouterr().err
    assert not (tmp_path / "report.html").exists()


def test_report_command_prints_both_paths(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    run = make_run(tmp_path / "run", reward_rows(1))
    assert main([str(run)]) == 0
    assert capsys.readouterr().out.split() == [str(run / "report.html"), str(run / "report.png")]


def test_matplotlib_is_imported_only_when_a_report_is_written():
    program = (
        "import sys, skyrl_train.tracking.report.report, skyrl_train.tracking.sinks; print('matplotlib' in sys.modules)"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "False"


def test_samples_in_the_report_are_spread_over_the_run_and_escaped(tmp_path: Path):
    run = make_run(tmp_path / "run", reward_rows(1))
    samples = [
        {"step": step, "prompt": "<b>", "response": "</pre><script>", "reward": 1.0, "stop_reason": "stop"}
        for step in range(101)
    ]
    (run / "samples.jsonl").write_text("".join(json.dumps(sample) + "\n" for sample in samples))
    assert [sample["step"] for sample in chosen_samples(run / "samples.jsonl")] == [0, 20, 40, 60, 80, 100]
    html_path, _ = write_report(run)
    assert Page(html_path).texts.count("</pre><script>") == NUM_SAMPLES


def test_charts_fill_every_row_of_the_grid(tmp_path: Path):
    history_rows = run_rows(3)
    for missing in ([], ["policy/policy_kl"], ["policy/policy_kl", "policy/grad_norm"]):
        rows = [{key: value for key, value in row.items() if key not in missing} for row in history_rows]
        (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        positions = grid_positions(charts_for(load_history(tmp_path / "metrics.jsonl")))
        cells = [(row, column + i) for row, column, span in positions for i in range(span)]
        assert sorted(cells) == [(row, column) for row in range(positions[-1][0] + 1) for column in range(COLUMNS)]


def test_moving_mean_keeps_the_ends_of_a_curve():
    assert moving_mean((9.0, 0.0, 3.0, 0.0, 6.0), 3) == [9.0, 4.0, 1.0, 3.0, 6.0]


def test_prompt_of_a_transcript_ends_where_the_policy_first_speaks():
    def sample(turns: int, *messages: tuple[str, str]) -> Sample:
        nothing = torch.zeros(0)
        transcript = [{"role": role, "content": content} for role, content in messages]
        return Sample(nothing, nothing, nothing, 0, torch.tensor([0.5]), "stop", turns, 0, {}, transcript)

    single = transcript_of(3, sample(1, ("user", "1+1="), ("assistant", "2")))
    assert (single.step, single.prompt, single.response, single.reward, single.stop_reason) == (
        3,
        "1+1=",
        "2",
        0.5,
        "stop",
    )
    example = [("user", "1+1="), ("assistant", "2"), ("user", "2+2=")]
    two_turns = transcript_of(3, sample(2, *example, ("assistant", "5"), ("user", "no"), ("assistant", "4")))
    assert two_turns.prompt == "user: 1+1=\nassistant: 2\nuser: 2+2="
    assert two_turns.response == "assistant: 5\nuser: no\nassistant: 4"
    silent = transcript_of(3, sample(0, ("user", "1+1=")))
    assert (silent.prompt, silent.response) == ("1+1=", "")


def streaming_row(step: int, end_s: float, **more: float) -> Row:
    times = {"timing/step": 10.0, "timing/wait_for_groups": 2.0, "timing/policy_train": 6.0, "timing/sync_weights": 1.0}
    return {"trainer/global_step": step, "trainer/unix_time_s": end_s, "async/running": 4.0} | times | more


def test_the_timeline_shows_when_trainer_and_engines_waited():
    """Step 2 writes a checkpoint for 3 s; in the 13 s until step 3 the engines idled for a tenth, at the end."""
    rows: dict[int, Any] = {
        2: streaming_row(2, 113.0, **{"timing/save_checkpoints": 3.0, "eval/lag_steps": 1.0, "timing/eval": 50.0}),
        3: streaming_row(3, 123.0, **{"async/engine_idle_share": 0.1}),
    }
    found, begun = bars(rows)
    assert begun == {2: 0.0, 3: 13.0}, "nobody waited for the evaluation"
    trainer = [(bar.phase, bar.start_s, bar.seconds) for bar in found if bar.lane == TRAINER]
    assert trainer[:4] == [
        ("timing/wait_for_groups", 0.0, 2.0), ("timing/policy_train", 2.0, 6.0),
        ("timing/sync_weights", 8.0, 1.0), ("timing/step", 9.0, 4.0),
    ]  # fmt: skip
    assert [start for _, start, _ in trainer[4:]] == [13.0, 15.0, 21.0, 22.0]
    engines = [(bar.phase, bar.start_s, bar.seconds) for bar in found if bar.lane != TRAINER and bar.seconds]
    assert engines == [
        ("timing/generate", 0.0, 23.0), ("timing/wait_for_groups", pytest.approx(11.7), pytest.approx(1.3)),
        ("timing/sync_weights", 9.0, 1.0), ("timing/sync_weights", 22.0, 1.0),
    ]  # fmt: skip


def test_the_timeline_has_the_last_steps_since_a_restart_and_only_of_a_streaming_run(tmp_path: Path):
    ends = [10.0 * step + (500 if step > 5 else 0) for step in range(1, 9)]
    rows = {step: streaming_row(step, end_s) for step, end_s in enumerate(ends, 1)}
    assert list(shown_steps(History(rows))) == [6, 7, 8]
    assert list(shown_steps(History({step: rows[step] for step in range(1, 6)}))) == [1, 2, 3, 4, 5]
    killed_after_checkpoint = {step: row for step, row in rows.items() if step != 7}
    assert list(shown_steps(History(killed_after_checkpoint))) == [8]
    synchronous = {step: {k: v for k, v in row.items() if k != "async/running"} for step, row in rows.items()}
    titles = [chart.title for chart in charts_for(History(rows))]
    assert titles == ["Time per step (s)", "Who waits for whom"]
    assert [chart.title for chart in charts_for(History(synchronous))] == ["Time per step (s)"]


def test_the_score_of_an_evaluation_beside_training_is_shown_at_the_step_where_it_began(tmp_path: Path):
    rows: list[Row] = [{"trainer/global_step": step} for step in range(1, 6)]
    rows[3] |= {"eval/all/avg_score": 0.5, "eval/lag_steps": 2.0, "timing/eval": 9.0}
    rows[4] |= {"eval/all/avg_score": 0.6}
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    history = load_history(tmp_path / "metrics.jsonl")
    assert history.series("eval/all/avg_score") == {2: 0.5, 5: 0.6}
    assert history.series("eval/lag_steps") == {4: 2.0} and history.series("timing/eval") == {4: 9.0}


def test_documented_table_of_metrics_is_the_one_in_the_code():
    assert TABLE.read_text() in (ROOT / "docs" / "tracking.md").read_text(), (
        "replace the table in docs/tracking.md by skyrl_train/tracking/metrics.md"
    )


def test_every_metric_that_the_source_names_is_documented():
    prefixes = "|".join(sorted({name.split("/")[0] for name in metric_units()}))
    documented = re.compile("|".join(re.sub(r"\\{\w+\\}", "[^/]+", re.escape(name)) for name in metric_units()))
    pattern = re.compile(rf"({prefixes})/[a-z0-9_/]*[a-z0-9]")
    named = {
        (node.value, path.name)
        for path in (ROOT / "skyrl_train").rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and pattern.fullmatch(node.value)
    }
    assert len(named) > 40
    assert not {(name, file) for name, file in named if not documented.fullmatch(name)}, "add to tracking/metrics.md"
