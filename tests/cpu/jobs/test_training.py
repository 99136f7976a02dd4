"""Whole runs of a tiny model through the command line, on several layouts."""

from __future__ import annotations

import json
import re
import signal
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.jobs import ROOT, Job, assert_interrupted, assert_whole_steps, run_to_end, running, write_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LAYOUT = "trainer.policy.megatron_config"
# A conversation of several turns, two ranks that share each layer, and KL in the reward.
GUESS = [
    "environment.env_class=guess_number",
    "data.train_data=[guesses.jsonl]",
    "generator.max_turns=3",
    "generator.max_input_length=64",
    "generator.sampling_params.max_generate_length=1",
    "generator.n_samples_per_prompt=16",
    # Nearly all guesses are wrong; without KL or entropy there would be no gradient at all.
    "trainer.algorithm.use_entropy_loss=true",
    "trainer.algorithm.use_kl_in_reward=true",
    "trainer.algorithm.kl_estimator_type=k1",
    "trainer.update_epochs_per_batch=2",
    "trainer.placement.policy_num_gpus_per_node=2",
    f"{LAYOUT}.tensor_model_parallel_size=2",
]


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_world(tmp_path_factory.mktemp("training") / "world")
    rows = [
        {"prompt": [{"role": "user", "content": "?"}], "reward_spec": {"ground_truth": str(n % 10)}} for n in range(32)
    ]
    (folder / "guesses.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def whole(world: Path) -> Job:
    """The run with everything: pipeline, a reference of another layout, an engine of two processes, mini-batches,
    evaluation, exports."""
    code, job = run_to_end(
        world,
        "trainer.run_name=whole",
        "trainer.placement.policy_num_gpus_per_node=2",
        f"{LAYOUT}.pipeline_model_parallel_size=2",
        "trainer.placement.ref_num_gpus_per_node=1",
        "trainer.ref.megatron_config.pipeline_model_parallel_size=1",
        "generator.inference_engine_tensor_parallel_size=2",
        "trainer.algorithm.use_kl_loss=true",
        "trainer.max_training_steps=3",
        "trainer.eval_interval=2",
        "data.val_data=[rows.jsonl]",
        "trainer.hf_save_interval=2",
        "trainer.log_samples_interval=1",
        "trainer.logger=[console,jsonl,tensorboard]",
    )
    assert code == 0, job.story()
    return job


def documented_names() -> list[re.Pattern[str]]:
    """Patterns of docs/tracking.md's table: `{...}` stands for any name."""
    text = (ROOT / "docs/tracking.md").read_text()
    names = re.findall(r"^\| `([a-z_]+/[^`]+)` \|", text, flags=re.MULTILINE)
    assert len(names) > 50
    return [re.compile(re.sub(r"\\{\w+\\}", ".+", re.escape(name))) for name in names]


def test_a_run_folder_holds_all_that_is_promised(whole: Job):
    names = {path.name for path in whole.run_dir.iterdir()}
    assert {
        "config.yaml",
        "metrics.jsonl",
        "samples.jsonl",
        "run.json",
        "report.html",
        "report.png",
        "logs",
        "exports",
        "evaluations",
        "tensorboard",
    } <= names
    logs = {path.name for path in (whole.run_dir / "logs").iterdir()}
    assert {"policy-0.log", "policy-1.log", "reference-0.log", "engine-0.log"} <= logs
    assert (whole.run_dir / "report.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((whole.run_dir / "run.json").read_text())["status"] == "finished"


def test_the_console_ends_with_the_paths_of_the_report_and_of_the_model(whole: Job):
    last = whole.output.strip().splitlines()[-3:]
    assert last[0].split()[-1] == str(whole.run_dir / "report.html")
    assert last[1].strip() == str(whole.run_dir / "report.png")
    assert last[2] == f"model   {whole.run_dir}/exports/global_step_3"


def test_each_step_is_one_object_with_its_number(whole: Job):
    assert [row["trainer/global_step"] for row in whole.metrics] == [0, 1, 2, 3]
    assert {row["trainer/global_step"] for row in whole.metrics if "eval/all/avg_score" in row} == {0, 2, 3}


def test_engine_and_policy_agree_in_each_step_before_the_update(whole: Job):
    steps = whole.metrics[1:]
    assert all(0 < row["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5 for row in steps)
    assert all(row["policy/rollout_train_logprobs_compared"] == 1.0 for row in steps), "every token is checked"


def test_every_metric_is_documented(whole: Job):
    patterns = documented_names()
    unknown = {name for row in whole.metrics for name in row if not any(p.fullmatch(name) for p in patterns)}
    assert not unknown


def test_the_metrics_that_users_know_are_there(whole: Job):
    expected = {
        "trainer/epoch",
        "reward/avg_raw_reward",
        "reward/avg_pass_at_4",
        "generate/avg_num_tokens",
        "loss/avg_final_rewards",
        "policy/final_loss",
        "policy/policy_kl",
        "policy/policy_entropy",
        "policy/grad_norm",
        "policy/policy_lr",
        "policy/loss_metrics/clip_ratio",
        "timing/step",
        "timing/generate",
        "timing/fwd_logprobs_values_reward",
        "timing/policy_train",
        "timing/sync_weights",
        "perf/generate_tokens_per_s",
        "perf/sync_gb_per_s",
        "perf/pipeline_bubble",
        "perf/driver_share",
        "balance/dp_imbalance",
    }
    for row in whole.metrics[1:]:
        assert expected <= row.keys(), expected - row.keys()
        assert row["policy/num_optimizer_steps"] == 2 and row["policy/num_skipped_steps"] == 0


def test_the_policy_leaves_the_reference_and_learns(whole: Job):
    kl = [row["policy/policy_kl"] for row in whole.metrics[1:]]
    assert 0 < kl[0] < kl[-1]
    scores = [row["eval/all/avg_score"] for row in whole.metrics if "eval/all/avg_score" in row]
    assert scores[-1] > scores[0], "greedy answers do not hold more digits after three steps that reward them"


def test_exports_are_whole_and_differ_from_step_to_step(whole: Job):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folders = sorted((whole.run_dir / "exports").iterdir())
    assert [folder.name for folder in folders] == ["global_step_2", "global_step_3"]
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in [whole.folder / "model", *folders]]
    for before, after in pairwise(models):
        pairs = zip(before.parameters(), after.parameters(), strict=True)
        assert all((one != other).any() for one, other in pairs)
    assert AutoTokenizer.from_pretrained(folders[0]).eos_token == "<eos>"


def test_transcripts_are_kept(whole: Job):
    rows = [json.loads(line) for line in (whole.run_dir / "samples.jsonl").read_text().splitlines()]
    assert {row["step"] for row in rows} == {1, 2, 3}
    assert all({"prompt", "response", "reward"} <= row.keys() for row in rows)
    assert [row["step"] for row in rows].count(1) == 32, "whole groups"
    files = sorted((whole.run_dir / "evaluations").iterdir())
    assert [file.name for file in files] == [f"global_step_{step}.jsonl" for step in (0, 2, 3)]
    scores = {
        row["trainer/global_step"]: row["eval/all/avg_score"] for row in whole.metrics if "eval/all/avg_score" in row
    }
    for file, score in zip(files, scores.values(), strict=True):
        evaluated = [json.loads(line) for line in file.read_text().splitlines()]
        assert sum(row["reward"] for row in evaluated) / len(evaluated) == pytest.approx(score)
        assert all(row["text"].startswith(row["prompt"]) and row["data_source"] == "sums" for row in evaluated)


def test_conversations_train_and_sigterm_to_the_whole_process_group_finishes_the_step_in_flight(world: Path):
    """As `timeout` and batch systems send it: Ray's own processes must outlive it until the driver ends them."""
    endless = ["trainer.max_training_steps=1000", "trainer.epochs=1000"]
    with running(world, "trainer.run_name=guesses", *GUESS, *endless) as job:
        job.wait_for_step(2)
        job.interrupt(signal.SIGTERM)
        assert job.wait() == 143, job.story()
        assert "stopping after this step" in job.output
        assert_whole_steps(job)
        assert_interrupted(job)
    assert all(row["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-5 for row in job.metrics)
    assert all(row["policy/grad_norm"] > 0 and row["policy/num_optimizer_steps"] == 4 for row in job.metrics)
    assert max(row["generate/avg_turns"] for row in job.metrics) > 1
    first, second = job.metrics[:2]
    assert first["loss/avg_final_rewards"] == pytest.approx(first["reward/avg_raw_reward"], abs=1e-6)
    assert abs(second["loss/avg_final_rewards"] - second["reward/avg_raw_reward"]) > 1e-7


def test_engines_in_fp8_are_corrected_and_their_rounding_ends_no_run(world: Path):
    """A random model differs by more than bfloat16 may, and every sync is compared."""
    code, job = run_to_end(
        world,
        *("trainer.run_name=fp8", "trainer.bf16=true", "generator.quantization=fp8", "trainer.verify_sync_every=1"),
        "generator.inference_engine_tensor_parallel_size=2",
    )
    assert code == 0, job.story()
    assert "fp8, corrected by token_tis, because" in job.output and "logprob_difference" not in job.output
    rows = [row for row in job.metrics if "policy/grad_norm" in row]
    assert len(rows) == 2
    for row in rows:
        assert 0.05 < row["policy/rollout_train_logprobs_abs_diff_mean"] < 0.2
        assert row["policy/correction/token_tis/is_ratio_max"] > 1
