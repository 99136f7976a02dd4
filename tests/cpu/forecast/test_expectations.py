"""The table "What to expect" of docs/scaling.md."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyrl_train.device.kinds import device_kind
from skyrl_train.entrypoints.plan.plan import PLAN
from skyrl_train.forecast.choices.chosen import chosen
from skyrl_train.forecast.forecast import Inputs, forecast, workload_of
from skyrl_train.forecast.parts import GIB
from skyrl_train.forecast.shapes import model_config

LAYOUT = "trainer.policy.megatron_config"
WORKLOAD = [
    *("trainer.train_batch_size=64", "trainer.policy_mini_batch_size=64", "generator.n_samples_per_prompt=8"),
    *("trainer.algorithm.use_kl_loss=false", f"{LAYOUT}.transformer_impl=torch"),
]


@pytest.mark.parametrize(
    ("shape", "num_gpus", "overrides", "gib", "seconds"),
    [
        ("qwen3-0.6b", 1, [], 65, 7.5),
        ("qwen3-0.6b", 2, [], 62, 3.8),
        ("qwen3-0.6b", 4, [], 61, 1.9),
        ("qwen3-0.6b", 8, [], 60, 0.94),
        ("qwen3-4b", 1, [], 107, 38),
        ("qwen3-4b", 2, [], 120, 19),
        ("qwen3-4b", 4, [], 109, 9.6),
        ("qwen3-4b", 8, [], 103, 4.8),
        ("qwen3-8b", 1, [f"{LAYOUT}.optimizer_cpu_offload=true"], 123, 72),
        ("qwen3-8b", 2, [], 118, 35),
        ("qwen3-8b", 4, [], 117, 18),
        ("qwen3-8b", 8, [], 105, 8.8),
        ("qwen3-30b-a3b", 1, [], None, 0),
        ("qwen3-30b-a3b", 2, [], None, 0),
        ("qwen3-30b-a3b", 4, [f"{LAYOUT}.tensor_model_parallel_size=4"], 136, 52),
        ("qwen3-30b-a3b", 8, [f"{LAYOUT}.expert_model_parallel_size=8"], 123, 6.2),
    ],
)
def test_the_documented_update_is_that_of_the_forecast(
    shape: str, num_gpus: int, overrides: list[str], gib: int | None, seconds: float
):
    gpus = f"trainer.placement.policy_num_gpus_per_node={num_gpus}"
    config = PLAN.load([f"trainer.policy.model.path={shape}", gpus, *WORKLOAD, *overrides])
    kind = device_kind("h200")
    assert kind is not None
    given = Inputs(config, {shape: model_config(shape)}, kind, workload_of(config))
    made = forecast(replace(given, config=chosen(given).config))
    assert made.fits is (gib is not None)
    if gib is not None:
        update = next(phase for phase in made.phases if phase.phase == "update")
        assert update.likely / GIB == pytest.approx(gib, abs=0.6)
        assert next(time.seconds for time in made.times if time.phase == "update") == pytest.approx(seconds, rel=0.03)
