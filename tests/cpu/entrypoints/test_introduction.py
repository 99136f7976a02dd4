"""What a run says of itself before it starts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from rich.console import Console

from skyrl_train.checks.staleness import double_weight_warning
from skyrl_train.checks.step import doubt_about_lengths, doubt_about_loss, doubt_about_penalty
from skyrl_train.config import load_config
from skyrl_train.entrypoints.experiment import Experiment

SERVERS = "generator.remote_inference_engine_urls=[http://a:1,http://b:1]"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["generator.num_inference_engines=3"], "3 engine(s)"),
        (
            ["generator.num_inference_engines=3", "generator.eval_num_engines=1"],
            "3 engine(s), 1 of them for evaluation",
        ),
        (["generator.run_engines_locally=false", SERVERS], "2 running vLLM server(s)"),
    ],
)
def test_a_run_prints_its_sampling_parameters(overrides: list[str], expected: str):
    run = Experiment.__new__(Experiment)
    run.config = load_config(["trainer.policy.model.path=tiny", *overrides])
    run.train_prompts, run.val_prompts = [], []
    assert run.introduction("one rank")["model"] == f"tiny, one rank, {expected}"


@pytest.mark.parametrize(
    ("model", "overrides", "warned"),
    [
        ("model", [], True),
        ("model", ["trainer.ckpt_interval=-1"], False),
        ("model", ["trainer.ckpt_interval=-1", "trainer.policy.model.lora.rank=4"], True),
        ("/shared/model", [], False),
    ],
)
def test_a_job_warns_if_its_checkpoints_or_adapters_refer_to_rays_copy_of_a_model(
    model: str, overrides: list[str], warned: bool, caplog: pytest.LogCaptureFixture
):
    copy = Path("/tmp/ray/session_1/runtime_resources/working_dir_files/_ray_pkg_1")
    run = Experiment.__new__(Experiment)
    run.config, run.checkpoint, run._console = load_config(overrides), None, Console(quiet=True)
    run.train_prompts, run.val_prompts, run.model_folder = [], [], str(copy / model)
    run._introduce(SimpleNamespace(path=copy / "runs/a"))  # type: ignore[arg-type]
    run_dir, *others = caplog.messages
    assert run_dir.startswith(f"trainer.run_dir is {copy}/runs/a: Ray deletes this copy of the working folder")
    assert [text.partition(":")[0] for text in others] == [f"trainer.policy.model.path is {copy}/model"] * warned


QUANTISED = ["generator.quantization=fp8", "generator.model_dtype=bfloat16"]
BECAUSE = "because they sample from another distribution than the trainer's"


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ([], None),
        (QUANTISED, f"fp8, corrected by token_tis, {BECAUSE}"),
        ([*QUANTISED, "trainer.algorithm.corrections=[icepop]"], f"fp8, corrected by icepop, {BECAUSE}"),
        (
            [*QUANTISED, "trainer.algorithm.policy_loss_type=rollout_is"],
            f"fp8, corrected by policy_loss_type=rollout_is, {BECAUSE}",
        ),
        (
            [
                *QUANTISED,
                "trainer.algorithm.policy_loss_type=dppo",
                "trainer.algorithm.corrections=[top_entropy,geometric_mask]",
            ],
            f"fp8, corrected by policy_loss_type=dppo, geometric_mask, {BECAUSE}",
        ),
    ],
)
def test_a_run_says_how_samples_of_quantised_engines_are_corrected(
    overrides: list[str], line: str | None, caplog: pytest.LogCaptureFixture
):
    run = Experiment.__new__(Experiment)
    run.config = load_config(["trainer.policy.model.path=tiny", *overrides])
    run.train_prompts, run.val_prompts = [], []
    assert run.introduction("one rank").get("engines") == line
    assert not caplog.messages


def test_a_run_warns_of_quantised_engines_without_a_correction(caplog: pytest.LogCaptureFixture):
    run = Experiment.__new__(Experiment)
    run.config = load_config(["trainer.policy.model.path=tiny", *QUANTISED, "trainer.algorithm.corrections=[]"])
    run.train_prompts, run.val_prompts = [], []
    assert "engines" not in run.introduction("one rank")
    (said,) = caplog.messages
    assert said.startswith("trainer.algorithm.corrections is [] and generator.quantization is fp8: samples are from ")


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.algorithm.policy_loss_type=gspo"], "loss_reduction is token_mean: gspo has one ratio per sample"),
        (
            ["trainer.algorithm.policy_loss_type=gspo", "trainer.algorithm.loss_reduction=sequence_mean"],
            "eps_clip_high is 0.2: the ratio of gspo is a mean over the sample",
        ),
        (["trainer.algorithm.policy_loss_type=reinforce"], "each step has 4 optimizer steps: it has no ratio"),
        (["trainer.algorithm.policy_loss_type=reinforce", "trainer.policy_mini_batch_size=1024"], None),
        (["+experiment=gspo"], None),
        (["+experiment=dapo"], None),
    ],
)
def test_a_run_warns_of_a_loss_that_is_not_that_of_its_paper(overrides: list[str], expected: str | None):
    doubt = doubt_about_loss(load_config(overrides).trainer)
    assert doubt is None if expected is None else doubt is not None and expected in doubt


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], "grpo divides"),
        (["advantage_estimator=maxrl"], "maxrl divides"),
        (["advantage_estimator=pass@k"], "pass@k divides"),
        (["grpo_norm_by_std=false"], None),
        (["advantage_estimator=rloo"], None),
        (["zero_variance_filter=true"], None),
        (["dynamic_sampling.type=filter"], None),
        (["kl_loss_coef=0"], None),
        (["use_kl_in_reward=false"], None),
        (["use_kl_in_reward=false", "advantage_estimator=maxrl", "overlong_buffer.len=9"], "near 0 or below"),
        (["use_kl_in_reward=false", "advantage_estimator=grpo", "overlong_buffer.len=9"], None),
    ],
)
def test_a_run_warns_of_a_penalty_that_the_estimator_divides_by_little(overrides: list[str], expected: str | None):
    keys = ["use_kl_loss=false", "use_kl_in_reward=true", *overrides]
    algorithm = load_config([f"trainer.algorithm.{key}" for key in keys]).trainer.algorithm
    doubt = doubt_about_penalty(algorithm)
    assert doubt is None if expected is None else doubt is not None and expected in doubt


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        ([], False),
        (["generator.max_turns=3"], True),
        (["generator.max_turns=3", "generator.max_input_length=4096"], False),
        (["+experiment=search"], False),
    ],
)
def test_a_run_warns_of_conversations_without_room_for_a_second_turn(overrides: list[str], warns: bool):
    doubt = doubt_about_lengths(load_config(overrides))
    assert (doubt is not None) == warns and (not warns or "Raise max_input_length" in str(doubt))


OWN_LOSSES = """
from skyrl_train.algorithms.inputs import LossTerms
from skyrl_train.algorithms.ratios import ratio, rollout_ratio

def to_engine(tokens): return LossTerms(-rollout_ratio(tokens) * tokens.advantages)
def to_old(tokens): return LossTerms(-ratio(tokens) * tokens.advantages)
def masked(tokens):
    distance = (tokens.old_logprobs - tokens.rollout_logprobs).abs()
    return LossTerms(-ratio(tokens) * tokens.advantages * (distance < 1))
"""


@pytest.mark.parametrize(
    ("loss", "corrections", "is_double"),
    [
        ("own_ratios:to_engine", "[token_tis]", True),
        ("own_ratios:to_engine", "[sequence_tis,outlier_mask]", True),
        ("own_ratios:to_engine", "[outlier_mask]", False),
        ("own_ratios:to_old", "[token_tis]", False),
        ("own_ratios:masked", "[token_tis]", False),
        ("regular", "[icepop]", False),
    ],
)
def test_a_run_warns_of_an_own_loss_whose_ratio_to_the_engine_would_count_twice(
    loss: str, corrections: str, is_double: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own_ratios.py").write_text(OWN_LOSSES)
    monkeypatch.syspath_prepend(tmp_path)
    keys = [f"policy_loss_type={loss}", f"corrections={corrections}"]
    doubt = double_weight_warning(load_config([f"trainer.algorithm.{key}" for key in keys]).trainer.algorithm)
    assert doubt is None if not is_double else doubt is not None and f"and {loss} reads rollout_logprobs" in doubt
