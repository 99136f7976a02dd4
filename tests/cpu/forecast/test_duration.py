"""Estimated times count the passes that a step makes."""

from __future__ import annotations

from dataclasses import replace

import pytest

from skyrl_train.config.rl import PLAN
from skyrl_train.device.kinds import device_kind
from skyrl_train.forecast.choices.chosen import chosen
from skyrl_train.forecast.forecast import Forecast, Inputs, forecast, workload_of
from skyrl_train.forecast.shapes import model_config

MEGATRON = "trainer.policy.megatron_config"
LORA = "trainer.policy.model.lora.rank=32"
SMALL = "trainer.max_tokens_per_microbatch=4096"


def made(*overrides: str, shape: str = "qwen3-0.6b", layers: int | None = None) -> Forecast:
    config = PLAN.load([f"trainer.policy.model.path={shape}", *overrides])
    kind = device_kind("h200")
    assert kind is not None
    given = Inputs(config, {shape: model_config(shape, layers)}, kind, workload_of(config))
    return forecast(replace(given, config=chosen(given).config))


def seconds(*overrides: str, shape: str = "qwen3-0.6b", layers: int | None = None) -> dict[str, float]:
    return {time.phase: time.seconds for time in made(*overrides, shape=shape, layers=layers).times}


@pytest.mark.parametrize("override", ["trainer.update_epochs_per_batch=2", f"{MEGATRON}.recompute_granularity=full"])
def test_scoring_passes_run_once_in_all_epochs_and_recompute_nothing(override: str):
    plain, other = seconds(), seconds(override)
    assert other["update"] > 1.3 * plain["update"]
    assert other["reference"] == plain["reference"] == pytest.approx(plain["update"] / 3)
    assert other["old logprobs"] == plain["old logprobs"]


def test_small_micro_batches_wait_for_the_host():
    """With a third of the tokens, three times as many micro-batches, each of which takes as long."""
    large, small, smaller = (
        seconds(LORA, f"trainer.max_tokens_per_microbatch={tokens}", shape="qwen3-30b-a3b", layers=8)["update"]
        for tokens in (16_384, 4_608, 1_536)
    )
    assert small > 1.2 * large and smaller == pytest.approx(3 * small, rel=0.01)


def test_adapters_cost_time_where_they_are():
    """Experts without adapters take no more time, and neither do passes with adapters off."""
    large = ["trainer.max_tokens_per_microbatch=32768", f"{MEGATRON}.recompute_granularity=null"]
    attention = "trainer.policy.model.lora.target_modules=[q_proj,k_proj,v_proj,o_proj]"
    plain, every, some, full = (
        seconds(*large, *adapters, shape="qwen3-30b-a3b")
        for adapters in ([], [LORA], [LORA, attention], [LORA, f"{MEGATRON}.recompute_granularity=full"])
    )
    assert some["update"] == pytest.approx(0.77 * every["update"])
    assert every["reference"] == some["reference"] == plain["reference"] == pytest.approx(plain["update"] / 3)
    assert some["weight sync"] < every["weight sync"], "fewer weights are merged"
    assert full["update"] == pytest.approx(every["update"] * 1.5, rel=0.01), "a forward pass is half of the FLOPs"


def test_half_of_the_layers_take_half_of_the_recomputation():
    """A forward pass is a third of the FLOPs; 14 of 28 layers."""
    full = f"{MEGATRON}.recompute_granularity=full"
    some = seconds(full, f"{MEGATRON}.recompute_num_layers=14")["update"]
    assert some == pytest.approx((seconds()["update"] + seconds(full)["update"]) / 2)


RANKS = "trainer.placement.policy_num_gpus_per_node=2"


@pytest.mark.parametrize(
    ("shape", "layers", "samples", "tokens", "overrides", "measured"),
    [
        ("qwen3-0.6b", None, 512, 640, [], 2.90),
        ("qwen3-4b", None, 64, 1_024, [], 3.124),
        ("qwen3-4b", None, 128, 1_024, [RANKS], 3.165),
        (
            "qwen3-4b",
            None,
            128,
            1_024,
            [RANKS, f"{MEGATRON}.pipeline_model_parallel_size=2", "trainer.max_tokens_per_microbatch=8192"],
            3.334,
        ),
        ("qwen3-4b", None, 64, 1_024, [RANKS, f"{MEGATRON}.tensor_model_parallel_size=2"], 1.819),
        ("qwen3-4b", None, 4, 32_768, [RANKS, f"{MEGATRON}.context_parallel_size=2"], 7.650),
        ("qwen3-30b-a3b", 6, 64, 1_024, [], 0.652),
        ("qwen3-30b-a3b", 6, 128, 1_024, [RANKS, f"{MEGATRON}.expert_model_parallel_size=2"], 0.707),
        ("qwen3-30b-a3b", 8, 64, 384, [LORA, SMALL, f"{MEGATRON}.recompute_granularity=null"], 0.656),
    ],
)
def test_updates_take_as_long_as_on_h200s(
    shape: str, layers: int | None, samples: int, tokens: int, overrides: list[str], measured: float
):
    """As measured by `python -m benchmarks.step --update-only` (docs/readings/gpu_performance.md)."""
    found = seconds(*of_samples(samples, tokens), *overrides, shape=shape, layers=layers)
    assert found["update"] == pytest.approx(measured, rel=0.02)


def of_samples(samples: int, tokens: int) -> list[str]:
    return [
        f"trainer.train_batch_size={samples}",
        f"trainer.policy_mini_batch_size={samples}",
        "generator.n_samples_per_prompt=1",
        f"trainer.max_prompt_length={tokens // 2}",
        f"generator.sampling_params.max_generate_length={tokens // 2}",
    ]


@pytest.mark.parametrize(
    ("layers", "recompute", "measured"), [(8, [f"{MEGATRON}.recompute_granularity=null"], 0.461), (48, [], 2.95)]
)
def test_adapted_experts_take_about_as_long_as_on_h200s(layers: int, recompute: list[str], measured: float):
    """As measured on a host of 1.44 s (docs/readings/gpu_performance.md, "All 48 layers with LoRA"): one constant for
    both, with and without recomputation.
    """
    large = "trainer.max_tokens_per_microbatch=32768"
    found = seconds(*of_samples(128, 384), LORA, large, *recompute, shape="qwen3-30b-a3b", layers=layers)
    assert found["update"] == pytest.approx(measured, rel=0.07)


def test_a_weight_sync_takes_as_long_as_on_h200s():
    """As measured by `python -m benchmarks.sync --shape qwen3-8b` (docs/readings/weight_sync.md)."""
    assert seconds(shape="qwen3-8b")["weight sync"] == pytest.approx(0.0634, rel=0.1)
    stages = [RANKS, f"{MEGATRON}.pipeline_model_parallel_size=2"]
    assert seconds(*stages)["weight sync"] == seconds()["weight sync"], "one stage sends after the other"


def test_a_sync_of_many_tensors_takes_as_long_as_on_h200s():
    """As measured by `python -m benchmarks.sync --shape qwen3-30b-a3b --layers 12 --pp 2 --colocate --syncs 10`."""
    found = next(each for each in made(shape="qwen3-30b-a3b", layers=12).times if each.phase == "weight sync")
    assert found.seconds == pytest.approx(0.295, rel=0.1) and found.bound == "host launches for 4,668 tensors"


def test_a_sync_of_merged_adapters_takes_as_long_as_on_h200s():
    """As measured by `python -m benchmarks.step --shape qwen3-30b-a3b --lora 32`."""
    assert seconds(LORA, shape="qwen3-30b-a3b")["weight sync"] == pytest.approx(1.65, rel=0.02)


def test_a_frozen_model_needs_the_same_memory_if_it_is_to_recompute():
    long = "generator.sampling_params.max_generate_length=60000"
    plain, other = (made(long, f"{MEGATRON}.recompute_granularity={what}").phases[2] for what in ("null", "full"))
    assert plain.phase == other.phase == "reference" and plain.likely == other.likely


def test_a_critic_computes_values_before_it_learns():
    found = seconds("trainer.algorithm.advantage_estimator=gae")
    assert found["critic"] == pytest.approx(found["update"] * 4 / 3)


def test_with_adapters_the_policy_scores_for_the_reference():
    assert seconds(LORA)["reference"] == pytest.approx(seconds()["reference"])
    assert "reference" not in seconds(LORA, "trainer.algorithm.use_kl_loss=false")


def test_frozen_weights_get_no_gradients_and_are_not_sent_with_an_adapter():
    plain, adapted = seconds(), seconds(LORA)
    assert 0.6 < adapted["update"] / plain["update"] < 0.8  # two thirds of the matrices, all of attention
    assert adapted["weight sync"] > plain["weight sync"], "merging takes time too"
    alone = made(LORA, "trainer.policy.model.lora.sync=adapter").times
    sent = next(each for each in alone if each.phase == "weight sync")
    assert sent.bound == f"host launches for {28 * 7 * 2} tensors"


@pytest.mark.parametrize(
    ("overrides", "has_pass"),
    [
        ([], True),
        (["trainer.policy_mini_batch_size=1024"], False),
        (["trainer.algorithm.prox_logp_method=loglinear"], False),
        (["trainer.policy_mini_batch_size=1024", "trainer.algorithm.policy_loss_type=clip_cov"], True),
        (["trainer.algorithm.prox_logp_method=loglinear", "trainer.algorithm.corrections=[top_entropy]"], True),
        (["trainer.policy_mini_batch_size=1024", LORA, "trainer.policy.model.lora.dropout=0.1"], True),
        (
            [
                "trainer.policy_mini_batch_size=1024",
                "trainer.algorithm.use_kl_loss=false",
                "trainer.algorithm.use_kl_in_reward=true",
            ],
            True,
        ),
    ],
)
def test_old_logprobs_are_computed_where_the_update_does_not_give_them(overrides: list[str], has_pass: bool):
    assert ("old logprobs" in seconds(*overrides)) is has_pass


def test_expected_lengths_change_times_and_not_what_must_fit():
    shape, kind = "qwen3-4b", device_kind("h200")
    long = ["trainer.max_tokens_per_microbatch=4096", "generator.sampling_params.max_generate_length=32000"]
    config = PLAN.load([f"trainer.policy.model.path={shape}", *long])
    assert kind is not None
    given = Inputs(config, {shape: model_config(shape)}, kind, workload_of(config))
    expected = forecast(replace(given, workload=workload_of(config, 300, 1000)))
    assert expected.phases == forecast(given).phases
    assert expected.seconds < forecast(given).seconds / 20


def test_a_critic_has_its_own_mini_batches():
    overrides = [
        "trainer.algorithm.advantage_estimator=gae",
        "trainer.train_batch_size=64",
        "trainer.policy_mini_batch_size=64",
        "generator.n_samples_per_prompt=1",
    ]
    whole, small = (made(*overrides, f"trainer.critic_mini_batch_size={size}") for size in (64, 2))
    assert whole.phases[:-1] == small.phases[:-1]
    activations = [
        next(part.likely for part in each.phases[-1].parts if part.name == "activations") for each in (whole, small)
    ]
    assert activations[1] == pytest.approx(activations[0] * 2 * 1_536 / 32_768)  # two samples, or a full micro-batch


def test_float32_is_computed_without_the_tensor_cores_of_bfloat16():
    plain, other = seconds(), seconds("trainer.bf16=false")
    assert other["update"] == pytest.approx(plain["update"] * 989 / 67)
    assert other["generation"] > 2 * plain["generation"]
