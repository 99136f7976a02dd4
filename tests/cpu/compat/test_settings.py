"""Configurations of programs of 0.4's form: `sys.argv`, `validate_cfg`, and keys that only the program knows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from omegaconf import OmegaConf

from skyrl_train.compat.losses import algorithm_config
from skyrl_train.compat.settings import config_of, translate_arguments, translated
from skyrl_train.config import ConfigError, load_config, main_config, to_yaml
from skyrl_train.entrypoints.main_base import config_dir, validate_cfg
from tests.support.hydra_main import composed
from tests.support.old_functions import registered

REPOSITORY = Path(__file__).parents[3]
ROWS = ("data.train_data=[rows.jsonl]", "trainer.policy.model.path=model")


def test_without_keys_of_its_own_a_program_has_the_configuration_of_the_command():
    given = ("trainer.policy.sequence_parallel_size=2", "generator.sampling_params.stop=null")
    assert config_of(composed(*ROWS, *given)) == load_config([*ROWS, *given])


def test_flags_groups_and_keys_of_the_program_stay_for_hydra():
    own = ["--config-dir", "configs", "+experiment=tiny", "+mine.size=3", "hydra.run.dir=out"]
    lines, translation = translated([*own, "trainer.strategy=fsdp2", "trainer.seed=5"])
    assert lines == [*own, "trainer.seed=5"] and list(translation.ignored) == ["trainer.strategy=fsdp2"]
    lines, _ = translated(["+mine=1", "trainer.strategy=fsdp2", "trainer.seed=5", "--config-name", "own"])
    assert lines == ["--config-name", "own", "+mine=1", "trainer.seed=5"]


def test_keys_of_the_program_are_in_extra():
    config = config_of(composed("+mine.size=3", "+later=0.5"))
    assert config.extra == {"mine": {"size": 3}, "later": 0.5}


def test_keys_of_the_program_are_read_at_their_path_too():
    given = {"generator.miniswe_config_path": "swe.yaml", "generator.mine": "own", "trainer.num_dummy_steps": 3}
    cfg = composed(*(f"+{key}={value}" for key, value in given.items()))
    assert {key: OmegaConf.select(cfg, key) for key in given} == given
    extra = config_of(cfg).extra
    assert (extra["miniswe_config_path"], extra["num_dummy_steps"]) == ("swe.yaml", 3)


def test_keys_of_0_4_that_the_program_itself_adds_are_translated():
    cfg = composed()
    OmegaConf.update(cfg, "trainer.policy.sequence_parallel_size", 2, force_add=True)
    assert config_of(cfg).trainer.policy.megatron_config.context_parallel_size == 2
    OmegaConf.update(cfg, "trainer.update_ref_every_epoch", True, force_add=True)
    with pytest.raises(ConfigError, match=r"trainer.update_ref_every_epoch=true: the reference stays"):
        config_of(cfg)


def test_keys_of_0_4_in_a_program_depend_on_its_other_keys_and_contradictions_are_errors():
    """As on a command line; the program's own file may set all of them."""
    masks = "trainer.algorithm.off_policy_correction"
    cfg = composed(
        "trainer.placement.colocate_all=false",
        "trainer.train_batch_size=256",
        f"{masks}.outlier_token_is_threshold_low=0.01",
    )
    for key, value in {
        "trainer.fully_async.max_staleness_steps": 4,
        "trainer.fully_async.num_parallel_generation_workers": 1024,
        f"{masks}.tis_ratio_type": "token",
        f"{masks}.outlier_token_is_threshold_high": 10.0,
        "generator.num_inference_engines": 4,
        "generator.inference_engine_data_parallel_size": 2,
    }.items():
        OmegaConf.update(cfg, key, value, force_add=True)
    config = config_of(cfg)
    trainer, correction = config.trainer, config.trainer.algorithm.off_policy_correction
    assert (trainer.source, trainer.max_staleness, trainer.pipeline_depth) == ("streaming", 4, 3)
    assert trainer.algorithm.corrections == ("token_tis", "outlier_mask")
    assert (correction.outlier_token_is_threshold_low, correction.outlier_token_is_threshold_high) == (0.01, 10.0)
    assert config.generator.num_inference_engines == 8
    OmegaConf.update(cfg, "trainer.algorithm.corrections", ["geometric_mask"])
    with pytest.raises(
        ConfigError, match=r"corrections=\['geometric_mask'\] is given too.*in the program's configuration"
    ):
        config_of(cfg)


def test_a_section_of_a_program_may_be_another_one_beside_keys_of_0_4():
    cfg = composed()
    OmegaConf.update(cfg, "trainer.ref.megatron_config", "${trainer.policy.megatron_config}", merge=False)
    OmegaConf.update(cfg, "trainer.policy.sequence_parallel_size", 2, force_add=True)
    assert config_of(cfg).trainer.policy.megatron_config.context_parallel_size == 2


def test_validate_cfg_reports_keys_of_0_4_in_the_program_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sys, "argv", ["main.py"])
    cfg = composed(*ROWS)
    OmegaConf.update(cfg, "generator.inference_engine_data_parallel_size", 3, force_add=True)
    validate_cfg(cfg)
    assert "0.4 in the program's configuration" in caplog.text
    assert "inference_engine_data_parallel_size=3 -> generator.num_inference_engines=3" in caplog.text
    caplog.clear()
    validate_cfg(cfg)
    assert not caplog.text


def test_validate_cfg_reports_the_arguments_of_the_process_and_leaves_what_0_4_leaves(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(sys, "argv", ["main.py", *ROWS, "trainer.strategy=fsdp2", "+mine=1"])
    translate_arguments()
    assert sys.argv[1:] == ["+mine=1", *ROWS]
    cfg = composed(*sys.argv[1:])
    validate_cfg(cfg)
    assert "trainer.strategy=fsdp2" in caplog.text
    assert cfg.trainer.algorithm.max_seq_len == 512 + 1024
    caplog.clear()
    validate_cfg(cfg)  # as initialize_ray does
    assert not caplog.text


def test_arguments_without_keys_of_0_4_may_remove_columns(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["main.py", *ROWS, "data.columns.env_class=null", "data.columns.prompt=question"])
    translate_arguments()
    assert sys.argv[-2:] == ["++data.columns.env_class=null", "++data.columns.prompt=question"]


def test_validate_cfg_refuses_what_the_command_refuses(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["main.py", "trainer.update_ref_every_epoch=true"])
    translate_arguments()
    with pytest.raises(ConfigError, match=r"update_ref_every_epoch=true"):
        validate_cfg(composed())
    with pytest.raises(ConfigError, match=r"trainer.train_batch_size"):
        validate_cfg(composed("trainer.train_batch_size=7"))


PROGRAM = """
import hydra
from omegaconf import DictConfig
from skyrl_train.compat.settings import config_of
from skyrl_train.entrypoints.main_base import BasePPOExp, validate_cfg

@hydra.main(config_path="conf", config_name="mine", version_base=None)
def main(cfg: DictConfig) -> None:
    cfg.trainer.seed = 11
    validate_cfg(cfg)
    validate_cfg(cfg)  # as initialize_ray does
    trainer, generator = config_of(cfg).trainer, config_of(cfg).generator
    correction = trainer.algorithm.off_policy_correction
    print(generator.num_inference_engines, trainer.algorithm.corrections, correction.token_tis_ratio_clip_high,
          trainer.source, trainer.max_staleness, trainer.train_batch_size, trainer.seed, cfg.mine)

main()
"""
YAML = f"""
defaults: [ppo_base_config, _self_]
hydra: {{searchpath: ["file://{config_dir}"], run: {{dir: out}}, output_subdir: null}}
generator: {{num_inference_engines: 4}}
trainer:
  algorithm: {{use_tis: true}}
  placement: {{colocate_all: false}}
"""


def test_keys_of_0_4_on_the_command_line_depend_on_the_yaml_of_the_program(tmp_path: Path):
    (tmp_path / "conf").mkdir()
    (tmp_path / "conf/mine.yaml").write_text(YAML)
    (tmp_path / "main.py").write_text(PROGRAM)
    old = ("inference_engine_data_parallel_size=2", "trainer.algorithm.tis_imp_ratio_cap=3.0")
    given = [f"generator.{old[0]}", old[1], "trainer.fully_async.max_staleness_steps=7", *ROWS, "+mine=1"]
    sizes = ["trainer.train_batch_size=32", "trainer.policy_mini_batch_size=32"]
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "main.py", "hydra/job_logging=stdout", *given, *sizes]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    *log, last = done.stdout.splitlines()
    assert last == "8 ('token_tis',) 3.0 streaming 7 32 11 1"
    assert f"    generator.{old[0]} -> generator.num_inference_engines=8" in log
    assert sum("on the command line" in line for line in log) == 1

    given = ["--multirun", "hydra.sweep.dir=sweep", "trainer.strategy=megatron", *ROWS, "+mine=1"]
    swept = ["trainer.train_batch_size=16,32", "trainer.policy_mini_batch_size=16"]
    command = [sys.executable, "main.py", "hydra/job_logging=stdout", *given, *swept]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [line.split()[-3] for line in done.stdout.splitlines() if line.startswith("4 (")] == ["16", "32"]


def test_modules_of_registered_functions_are_imported_by_all_processes_and_get_all_keys(tmp_path: Path):
    with registered():
        cfg: Any = composed("trainer.algorithm.policy_loss_type=old_clip", "+trainer.algorithm.mine=2")
        validate_cfg(cfg)
        assert cfg.trainer.custom_modules == ["tests.support.old_functions"]
        config = config_of(cfg)
        written = yaml.safe_load(to_yaml(config))["trainer"]["algorithm"]["parameters"]
        (file := tmp_path / "config.yaml").write_text(to_yaml(config))
        longer = main_config([f"--config-file={file}", "generator.sampling_params.max_generate_length=8192"])
    assert config.trainer.algorithm.parameters == {"mine": 2, "max_seq_len": 1536}
    assert written == {"mine": 2} and longer.trainer.algorithm.parameters == {"mine": 2, "max_seq_len": 512 + 8192}


def test_keys_that_refer_to_translated_ones_follow_them_as_on_a_command_line():
    cfg: Any = composed(ROWS[0])
    OmegaConf.update(cfg, "generator.model_name", "mine", force_add=True)
    trainer = config_of(cfg).trainer
    assert trainer.policy.model.path == trainer.ref.model.path == trainer.critic.model.path == "mine"
    cfg = composed(*ROWS)
    OmegaConf.update(cfg, "trainer.fully_async.max_staleness_steps", 4, force_add=True)
    assert config_of(cfg).trainer == load_config([*ROWS, "trainer.source=streaming", "trainer.max_staleness=4"]).trainer


def test_values_of_0_4_in_the_program_are_translated_without_keys_of_0_4():
    cfg: Any = composed(*ROWS, "trainer.ref.model.path=teacher", "trainer.algorithm.use_kl_loss=false")
    OmegaConf.update(cfg, "generator.sampling_params.stop", None)
    OmegaConf.update(cfg, "trainer.algorithm.advantage_estimator", "no_op")
    config = config_of(cfg)
    assert config.generator.sampling_params.stop == config.generator.eval_sampling_params.stop == ()
    assert config.trainer.teacher.model.path == "teacher"
    cfg = composed(*ROWS)
    OmegaConf.update(cfg, "environment.skyrl_gym.mine.pattern", r"a \${b} c", force_add=True)
    assert "a ${b} c" in str(config_of(cfg).environment.skyrl_gym)


def test_nested_keys_of_the_program_reach_the_function_with_their_path():
    own = ("+trainer.algorithm.mine.alpha=0.1", "+trainer.algorithm.mine.deep.beta=2", "+trainer.algorithm.sapo.own=3")
    with registered():
        cfg: Any = composed("trainer.algorithm.policy_loss_type=old_clip", *own)
        validate_cfg(cfg)
        config = config_of(cfg)
    assert config.extra == {}
    seen = algorithm_config(config.trainer.algorithm.values)
    assert seen.mine == {"alpha": 0.1, "deep": {"beta": 2}} and seen.sapo == {**cfg.trainer.algorithm.sapo, "own": 3}
