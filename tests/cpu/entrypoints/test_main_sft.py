"""Fine-tuning as a user starts it: what it says when something is wrong, and what a run leaves behind."""

from __future__ import annotations

import json
import shutil
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file

from skyrl_train.config.sft import load_sft_config
from skyrl_train.data.order import OrderState
from skyrl_train.entrypoints import command, export_hf, main_sft, run
from skyrl_train.entrypoints.sft_run import SftRun
from skyrl_train.file_sum import sum_of
from skyrl_train.tasks.sft_quickstart import MODEL, write_untrained
from skyrl_train.tracking.run_dir import read_record, write_record
from skyrl_train.trainer.from_config import settings_of
from skyrl_train.trainer.run_state import Checkpoints, RunState
from tests.support.checkpoints import tensors_of
from tests.support.jobs import Job, assert_interrupted, start_command

ROWS = [
    {"messages": [{"role": "user", "content": f"{a}+{b}="}, {"role": "assistant", "content": str(a + b)}]}
    for a in range(10)
    for b in range(10)
]
RUN = ["data.train_data=[rows.jsonl]", "data.max_length=32", f"trainer.policy.model.path={MODEL}", "trainer.bf16=false"]
SMALL = ["trainer.logger=[console,jsonl]", "trainer.train_batch_size=16", "trainer.max_tokens_per_microbatch=64"]


@pytest.fixture(scope="module")
def made_world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its data."""
    folder = tmp_path_factory.mktemp("sft")
    write_untrained(folder / MODEL, seed=1)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return folder


@pytest.fixture
def world(made_world: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder is a world whose runs must never come as far as Ray."""

    def never() -> None:
        raise AssertionError("Ray was started")

    monkeypatch.chdir(made_world)
    monkeypatch.setattr(run, "connect", never)
    # Setting SIGTERM's handler is the test runner's own business here.
    monkeypatch.setattr(command.signal, "signal", lambda *arguments: None)
    monkeypatch.setenv("COLUMNS", "500")
    return made_world


def error(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code = main_sft.main([*RUN, *SMALL, *arguments])
    printed = capsys.readouterr().out
    assert code == 2 and printed.startswith("error: ") and printed.count("error: ") == 1, printed
    return printed


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trainer.train_batchsize=4"], "unknown key trainer.train_batchsize: did you mean trainer.train_batch_size?"),
        (["data.max_lenght=4"], "unknown key data.max_lenght: did you mean data.max_length?"),
        (["data.too_long=cut"], "data.too_long is 'cut': It must be one of drop, truncate"),
        (["+experiment=quickstart"], "Run python -m skyrl_train.entrypoints.main_base +experiment=quickstart"),
        (["data.train_data=[gone.jsonl]"], "data.train_data contains gone.jsonl: there is no such file in"),
        (["data.train_data=[]"], "data.train_data is empty: nothing to train on"),
        (["data.val_data=[gone.jsonl]"], "data.val_data contains gone.jsonl: there is no such file in"),
        (["trainer.policy.model.path=./gone"], "trainer.policy.model.path is ./gone: there is no such folder"),
        (
            ["trainer.train_batch_size=101"],
            "trainer.train_batch_size is 101: more than the 100 rows of data.train_data",
        ),
        (
            ["data.max_length=4096"],
            "data.max_length is 4096: more than the model's 512 positions. Set it to at most 512",
        ),
        (["data.max_length=2"], "data.max_length is 2: the shortest row has"),
        (["trainer.resume_mode=lates"], "trainer.resume_mode is 'lates': did you mean latest?"),
        (
            ["trainer.resume_mode=from_path", "trainer.resume_path=gone"],
            "gone does not exist, so it is not a checkpoint",
        ),
        (
            ["trainer.policy.megatron_config.pipeline_model_parallel_size=4"],
            "is 1 ranks: not a multiple of trainer.policy.megatron_config's tensor 1 x pipeline 4",
        ),
    ],
    ids=lambda value: value[:40] if isinstance(value, str) else "",
)
def test_what_cannot_work_is_one_message_with_key_place_and_cure(
    world: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], expected: str
):
    assert expected in error(capsys, *arguments)


def write_last_checkpoint(world: Path, arguments: list[str], export: str | None = "its digest") -> Path:
    """That of step 3. Returns: the folder of the run."""
    trainer = load_sft_config(arguments).trainer
    checkpoints = Checkpoints(trainer.ckpt_path, 1)
    checkpoints.begin(folder := checkpoints.folder(3))
    (folder / "rank_0.pt").touch()
    order = OrderState(epoch=0, position=48, num_rows=len(ROWS), seed=trainer.seed)
    state = RunState(3, 3, False, asdict(order), 1, settings_of(trainer), "its id", {}, export=export)
    checkpoints.finish(folder, state, [sum_of(folder / "rank_0.pt")])
    return world / "runs" / trainer.run_name


def test_a_run_whose_steps_are_all_done_says_so_and_starts_nothing(world: Path, capsys: pytest.CaptureFixture[str]):
    arguments = [*RUN, *SMALL, "trainer.run_name=done", "trainer.max_training_steps=3", "trainer.resume_mode=latest"]
    run_dir = write_last_checkpoint(world, arguments)
    before = sorted(path.name for path in run_dir.iterdir())
    assert main_sft.main(arguments) == 0
    assert "all steps are done. For more, raise trainer.epochs or trainer.max_training_steps" in capsys.readouterr().out
    assert sorted(path.name for path in run_dir.iterdir()) == before


@pytest.mark.parametrize(
    ("export", "interval", "is_done"), [(None, -1, False), (None, 0, True), ("its digest", -1, True)]
)
def test_a_run_that_ends_at_a_checkpoint_without_an_export_is_not_done(
    export: str | None, interval: int, is_done: bool, world: Path
):
    arguments = [*RUN, *SMALL, "trainer.run_name=short", "trainer.max_training_steps=3", "trainer.resume_mode=latest"]
    arguments.append(f"trainer.hf_save_interval={interval}")
    write_last_checkpoint(world, arguments, export)
    training = SftRun(load_sft_config(arguments), Console())
    try:
        assert training.find_checkpoint() and training.is_done == is_done
    finally:
        training.close()


def test_a_run_that_was_killed_after_its_last_checkpoint_is_finished_by_the_next_start(
    world: Path, capsys: pytest.CaptureFixture[str]
):
    arguments = [*RUN, *SMALL, "trainer.run_name=last", "trainer.max_training_steps=3", "trainer.resume_mode=latest"]
    run_dir = write_last_checkpoint(world, arguments)
    (run_dir / "metrics.jsonl").write_text('{"trainer/global_step": 3, "sft/loss": 1.0}\n')
    write_record(run_dir, {"status": "running", "run_id": "its id"})
    assert main_sft.main(arguments) == 0
    assert "all steps are done. For more, raise" in (said := capsys.readouterr().out) and "report  " in said
    assert (run_dir / "report.html").exists() and read_record(run_dir)["status"] == "finished"
    written = (run_dir / "run.json").read_text()
    assert main_sft.main(arguments) == 0
    assert (run_dir / "run.json").read_text() == written, "once"


def test_a_model_with_a_cut_file_is_refused_before_anything_starts(
    world: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    broken = Path(shutil.copytree(world / MODEL, tmp_path / "broken"))
    file = broken / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    assert "model.safetensors is not a complete" in error(capsys, f"trainer.policy.model.path={broken}")


def test_a_row_without_an_assistant_and_an_empty_file_are_named(world: Path, capsys: pytest.CaptureFixture[str]):
    (world / "bad.jsonl").write_text(json.dumps(ROWS[0]) + '\n{"messages": [{"role": "user", "content": "1"}]}\n')
    assert "bad.jsonl, line 2: no message has the role assistant" in error(capsys, "data.train_data=[bad.jsonl]")
    (world / "empty.jsonl").write_text("")
    assert "data file empty.jsonl is empty" in error(capsys, "data.train_data=[empty.jsonl]")


@contextmanager
def fine_tuning(folder: Path, name: str, *overrides: str) -> Iterator[Job]:
    module = [sys.executable, "-m", "skyrl_train.entrypoints.main_sft"]
    arguments = [*module, *RUN, *SMALL, f"trainer.run_name={name}", *overrides]
    job = start_command(arguments, folder, name, uuid.uuid4().hex, {})
    try:
        yield job
    finally:
        job.kill()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_run_on_two_ranks_trains_evaluates_exports_and_reports(made_world: Path):
    """Two data-parallel ranks, a long row that is cut, 12 steps in 2 epochs."""
    long = {"messages": [*ROWS[0]["messages"], *ROWS[1]["messages"] * 12]}
    (made_world / "more.jsonl").write_text(json.dumps(long) + "\n")
    overrides = [
        "data.train_data=[rows.jsonl,more.jsonl]",
        "data.val_data=[rows.jsonl]",
        "data.too_long=truncate",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.epochs=2",
        "trainer.eval_interval=5",
        "trainer.eval_batch_size=48",
        "trainer.hf_save_interval=8",
        "trainer.policy.optimizer_config.lr=1e-3",
        "trainer.ckpt_interval=5",
        "trainer.max_ckpts_to_keep=2",
    ]
    with fine_tuning(made_world, "whole", *overrides) as job:
        assert job.wait() == 0, job.story()
        assert not (left := job.left_behind()), left
    output, metrics = job.output, job.metrics
    assert "truncated 1 of 101 rows with more than data.max_length=32 tokens" in output
    assert "2 policy ranks (DP2)" in output and "held-out loss" in output and "policy is up" in output
    assert [row["trainer/global_step"] for row in metrics] == list(range(13))
    assert [row["trainer/global_step"] for row in metrics if "sft/eval_loss" in row] == [0, 5, 10, 12]
    assert [row["trainer/epoch"] for row in metrics[1:]] == [0.0] * 6 + [1.0] * 6
    assert metrics[-1]["sft/eval_loss"] < metrics[0]["sft/eval_loss"] - 0.5
    assert {"sft/loss", "policy/grad_norm", "policy/policy_lr", "perf/train_tokens_per_s"} <= metrics[1].keys()
    assert not [name for name in metrics[1] if "rollout" in name or "clip" in name or name.startswith("reward")]
    assert sorted(path.name for path in (job.run_dir / "exports").iterdir()) == ["global_step_12", "global_step_8"]
    exported, before = tensors_of(job.run_dir / "exports/global_step_12"), tensors_of(made_world / MODEL)
    assert exported.keys() == before.keys() and all(not torch.equal(exported[k], before[k]) for k in before)
    html = (job.run_dir / "report.html").read_text()
    assert "held-out loss" in html and "tokens/s trained, mean" in html
    record = json.loads((job.run_dir / "run.json").read_text())
    assert record["status"] == "finished" and record["changes"]["data.too_long"] == "truncate"
    assert not [key for key in record["changes"] if key.startswith(("generator", "environment"))]
    assert exported_loss(made_world, job) == pytest.approx(metrics[-1]["sft/eval_loss"], abs=1e-5)
    assert_resumes_bit_for_bit(made_world, job, overrides)


def assert_resumes_bit_for_bit(world: Path, whole: Job, overrides: list[str]) -> None:
    """From step 10 of 12, because the checkpoint of step 12 is damaged."""
    folder = whole.run_dir / "checkpoints"
    assert sorted(path.name for path in folder.iterdir()) == ["global_step_10", "global_step_12"]
    newest = folder / "global_step_12/rank_0.pt"
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    expected, exported = whole.metrics[11:], tensors_of(whole.run_dir / "exports/global_step_12")
    shutil.rmtree(whole.run_dir / "exports")
    with fine_tuning(world, "whole", *overrides, "trainer.resume_mode=latest") as job:
        assert job.wait() == 0, job.story()
    assert "global_step_12 is damaged: rank_0.pt has other bytes than were written" in job.output
    assert "resumes after step 10, from" in job.output
    assert [row["trainer/global_step"] for row in job.metrics] == [*range(13), 11, 12]
    for mine, theirs in zip(job.metrics[13:], expected, strict=True):
        same = [name for name in theirs if name.split("/")[0] in ("sft", "policy")]
        assert [(name, mine[name]) for name in same] == [(name, theirs[name]) for name in same]
    assert job.output.splitlines()[-1] == f"model   {job.run_dir.resolve()}/exports/global_step_12"
    assert_a_checkpoint_is_exported(job, job.run_dir / "exports/global_step_12")
    mine = tensors_of(job.run_dir / "exports/global_step_12")
    assert mine.keys() == exported.keys() and not [name for name in mine if not torch.equal(mine[name], exported[name])]


def exported_loss(folder: Path, job: Job) -> float:
    """The held-out loss as transformers computes it of the exported model, row by row."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = job.run_dir / "exports/global_step_12"
    model, tokenizer = (
        AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32),
        AutoTokenizer.from_pretrained(path),
    )
    total, count = 0.0, 0
    for row in ROWS:
        question, answer = (message["content"] for message in row["messages"])
        asked, answered = tokenizer.encode(question), tokenizer.encode(answer + tokenizer.eos_token)
        ids = torch.tensor([[*asked, *answered]])
        labels = torch.tensor([[-100] * len(asked) + answered])
        with torch.no_grad():
            total += model(input_ids=ids, labels=labels).loss.item() * len(answered)
        count += len(answered)
    return total / count


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_model_that_cannot_be_trained_and_an_export_that_cannot_be_written_end_the_run_with_an_error(
    made_world: Path, tmp_path: Path
):
    shutil.copytree(made_world / MODEL, tmp_path / "broken")
    (file,) = (tmp_path / "broken").glob("*.safetensors")
    tensors = load_file(file)
    next(tensor for name, tensor in tensors.items() if name.endswith("q_proj.weight")).fill_(float("nan"))
    save_file(tensors, file, metadata={"format": "pt"})
    (tmp_path / "exports").mkdir()
    for step in range(1, 4):  # a file where the folder of the export should be
        (tmp_path / f"exports/global_step_{step}").touch()
    overrides = [
        f"trainer.policy.model.path={tmp_path}/broken",
        f"trainer.export_path={tmp_path}/exports",
        "trainer.hf_save_interval=1",
        "trainer.max_training_steps=3",
    ]
    with fine_tuning(made_world, "broken", *overrides) as job:
        assert job.wait() == 1, job.story()
    assert "the export of step 1 could not be written, the run continues: policy-0 failed to run save_hf" in job.output
    (message,) = (line for line in job.output.splitlines() if line.startswith("error: "))
    assert "the export of step 3, the last one, could not be written: policy-0 failed to run save_hf" in message
    assert "the model was not trained: the updates of all 3 steps were skipped" in message
    assert not list((job.run_dir / "checkpoints").glob("*"))
    assert json.loads((job.run_dir / "run.json").read_text())["status"] == "failed"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_ctrl_c_finishes_the_step_in_flight(made_world: Path):
    overrides = ["trainer.ckpt_interval=1", "trainer.hf_save_interval=-1", "trainer.epochs=100000"]
    with fine_tuning(made_world, "stopped", *overrides) as job:
        job.wait_for_step(3)
        job.interrupt()
        assert job.wait() == 130
        assert "stopping after this step" in job.output
        assert_interrupted(job)
    resume, model = job.output.splitlines()[-2:]
    assert resume.startswith("resume  python -m skyrl_train.entrypoints.main_sft ")
    assert resume.endswith(" trainer.resume_mode=latest") and "To export it: python -m" in model
    last = len(job.metrics)
    assert [row["trainer/global_step"] for row in job.metrics] == list(range(1, last + 1))
    assert (job.run_dir / f"checkpoints/global_step_{last}/checkpoint.json").exists()


def assert_a_checkpoint_is_exported(job: Job, exported: Path) -> None:
    """By the command, with the bits that the run exported."""
    again = job.folder / "again"
    assert export_hf.main([f"checkpoint={job.run_dir}", f"export_path={again}"]) == 0
    assert (again / "SHA256SUMS").read_bytes() == (exported / "SHA256SUMS").read_bytes()
