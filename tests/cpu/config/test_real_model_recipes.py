"""Recipes for real models pass every check that needs no file, and the layout that their headers describe is theirs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from skyrl_train.checks.rl import check
from skyrl_train.checks.sft import check_sft
from skyrl_train.config import load_config
from skyrl_train.config.sft import SFT

FOLDER = Path(__file__).parents[3] / "configs/experiment"


@pytest.mark.parametrize(
    ("name", "num_ranks", "lora_rank"),
    [
        *(("gsm8k_1gpu", 1, 0), ("gsm8k_4gpu", 4, 0), ("lora_single_gpu", 1, 32)),
        *(("dapo_math", 8, 0), ("search", 8, 0), ("text2sql", 8, 0)),
    ],
)
def test_a_recipe_of_reinforcement_learning_passes_the_checks(name: str, num_ranks: int, lora_rank: int):
    config = load_config([f"+experiment={name}"])
    check(config, None, files=False)
    assert config.trainer.placement.num_policy_ranks == config.generator.num_inference_engines == num_ranks
    assert config.trainer.policy.model.lora.rank == lora_rank
    assert config.trainer.run_name == name


def test_the_recipe_of_fine_tuning_passes_the_checks():
    config = SFT.load(["+experiment=sft_chat"])
    check_sft(config, None, False)
    assert config.trainer.placement.num_policy_ranks == 1


@pytest.mark.parametrize(
    "name", ["gsm8k_1gpu", "gsm8k_4gpu", "lora_single_gpu", "sft_chat", "dapo_math", "search", "text2sql"]
)
def test_the_header_has_the_command_the_memory_and_time_of_a_step_and_says_what_was_not_run(name: str):
    header = (FOLDER / f"{name}.yaml").read_text()
    main = "main_sft" if name.startswith("sft") else "main_base"
    assert f"python -m skyrl_train.entrypoints.{main} +experiment={name}" in header
    assert "Forecast, not measured" in header and "downloaded" in header
    assert (
        re.search(r"\d GB for|take \d+ GB", header)
        and "activations" in header
        and re.search(r"\d (s|minutes)\s+(# )?per step", header)
    )
