"""Open keys are chosen so that a run fits for sure, with the least recomputation; the cases were computed by hand."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from skyrl_train.config import load_config
from skyrl_train.config.policy import Layout
from skyrl_train.config.rl import PLAN
from skyrl_train.config.sft import load_sft_config
from skyrl_train.device.kinds import device_kind
from skyrl_train.forecast.choices.chosen import chosen
from skyrl_train.forecast.choices.trainers import _option
from skyrl_train.forecast.forecast import Inputs, forecast, largest_pass, workload_of
from skyrl_train.forecast.parts import GIB
from skyrl_train.forecast.report import choices_line
from skyrl_train.forecast.shapes import model_config

MEGATRON = "trainer.policy.megatron_config"
RANKS = "trainer.placement.policy_num_gpus_per_node"
EP8 = f"{MEGATRON}.expert_model_parallel_size=8"
CHEAP = ["layernorm", "mlp_act"]
EVALUATED = ["data.val_data=[a.jsonl]", "trainer.eval_batch_size=300"]


def inputs(shape: str, device: str, *overrides: str) -> Inputs:
    config = PLAN.load([f"trainer.policy.model.path={shape}", f"{MEGATRON}.transformer_impl=torch", *overrides])
    kind = device_kind(device)
    assert kind is not None
    return Inputs(config, {shape: model_config(shape)}, kind, workload_of(config))


def values(given: Inputs) -> dict[str, Any]:
    return {key.rpartition(".")[2]: value for choice in chosen(given).made for key, value in choice.values}


@pytest.mark.parametrize(
    ("shape", "device", "overrides", "tokens", "recompute", "modules"),
    [
        # 596 million parameters with 2 + 4 + 12 bytes: 10.0 GiB. 28 layers keep 49,216 bytes per token: 42.1 GiB.
        ("qwen3-0.6b", "h100", [], 32_768, None, None),
        # 4,022 million: 67.4 GiB. 36 layers keep 109.7 kB: 15.1 GiB for 4,096 tokens, 11.0 if the cheap part (29.7 kB)
        # is recomputed. With CUDA context and NCCL both are above 79.2; the layers' inputs alone (5,120 bytes) take
        # 2.8 GiB for 16,384.
        ("qwen3-4b", "h100", [], 8_192, "full", None),
        # 67.4 + 30.1 GiB for 8,192 tokens; 60.3 for 16,384, with an error of 10 %, and 1.2 of context, are 134.9
        # before logits.
        ("qwen3-4b", "h200", [], 8_192, None, None),
        # Adam's 12 bytes on two GPUs: 44.9 GiB; 15.1 fit beside them, 30.1 do not.
        ("qwen3-4b", "h100", [f"{RANKS}=2"], 4_096, None, None),
        # 8,191 million with 6 bytes and 12 on eight GPUs: 57.2 GiB. 36 layers keep 145,536 bytes: 20.0 GiB for 4,096
        # tokens, which is 79.2 with an error of 10 %; 40,960 bytes fewer if the cheap part is recomputed: 14.4. That is
        # 81.1 with errors, context and what weight syncs keep. Two samples of 1,536 tokens need 10.8 instead.
        ("qwen3-8b", "h100", [f"{RANKS}=8"], 3_072, "selective", CHEAP),
        # On two GPUs 91.5 GiB and 20.0 for 4,096 tokens; 40.0 for 8,192 are 135.5 with the error, before context.
        ("qwen3-8b", "h200", [f"{RANKS}=2"], 4_096, None, None),
        # On four H100s 68.7 GiB and the inputs of the layers (8,192 bytes): 1.1 GiB for 4,096 tokens.
        ("qwen3-8b", "h100", [f"{RANKS}=4"], 4_096, "full", None),
        # 1.54 billion shared parameters with 6 + 12 / 8 bytes, and 28.99 billion of experts on eight GPUs with 18.
        ("qwen3-30b-a3b", "h200", [f"{RANKS}=8", EP8], 7_680, None, None),
        (
            "qwen3-30b-a3b",
            "h100",
            [f"{RANKS}=8", "trainer.placement.policy_num_nodes=2", EP8],
            3_072,
            "selective",
            ["layernorm", "moe_act"],
        ),
    ],
)
def test_the_least_recomputation_that_fits_is_chosen_with_the_largest_micro_batch(
    shape: str, device: str, overrides: list[str], tokens: int, recompute: str | None, modules: list[str] | None
):
    found = values(given := inputs(shape, device, *overrides))
    assert (found["max_tokens_per_microbatch"], found["recompute_granularity"]) == (tokens, recompute)
    assert found.get("recompute_modules") == modules
    made = forecast(replace(given, config=chosen(given).config))
    assert all(phase.high <= made.capacity for phase in made.phases if phase.phase in ("update", "reference"))


def test_more_is_recomputed_where_the_gpu_would_wait_for_the_host():
    """With 4,096 tokens per micro-batch nothing would be recomputed, in almost twice the time."""
    workload = ["trainer.train_batch_size=16", "trainer.policy_mini_batch_size=16", "trainer.max_prompt_length=128"]
    generated = ["generator.n_samples_per_prompt=8", "generator.sampling_params.max_generate_length=256"]
    given = inputs("qwen3-30b-a3b", "h200", "trainer.policy.model.lora.rank=32", *workload, *generated)
    found = values(given)
    assert (found["max_tokens_per_microbatch"], found["recompute_granularity"]) == (32_768, "full")
    reason = next(choice.reason for choice in chosen(given).made if "recomputing" in choice.reason)
    assert reason.endswith("because the GPU would wait for the host")
    # Samples that are shorter than the longest fill micro-batches, of which two do not fit into one here.
    longer = inputs("qwen3-4b", "h100", f"{RANKS}=2", "generator.sampling_params.max_generate_length=1700")
    assert values(longer)["recompute_granularity"] is None


def test_the_state_of_the_hand_computed_cases_is_that_of_the_forecast():
    for shape, device, overrides, gib in (
        ("qwen3-4b", "h100", [], 67.4),
        ("qwen3-8b", "h100", [f"{RANKS}=8"], 57.2),
        ("qwen3-30b-a3b", "h200", [f"{RANKS}=8", EP8], 1.54e9 * 7.5 / GIB + 28.99e9 / 8 * 18 / GIB),
    ):
        given = inputs(shape, device, *overrides)
        update = next(phase for phase in forecast(given).phases if phase.phase == "update")
        state = sum(part.likely for part in update.parts if part.name in ("weights", "gradients", "optimizer"))
        assert state / GIB == pytest.approx(gib, abs=0.2)


def test_what_is_given_stays_and_the_rest_is_chosen_around_it():
    given = inputs("qwen3-4b", "h200", "trainer.max_tokens_per_microbatch=16384", "generator.max_num_seqs=64")
    found = values(given)
    # 80.0 kB for each layer and token: 43.9 GiB with what is cheap recomputed, 60.3 without.
    assert found["recompute_granularity"] == "selective" and found["recompute_modules"] == CHEAP
    assert "max_tokens_per_microbatch" not in found and "max_num_seqs" not in found
    config = chosen(given).config
    assert config.trainer.micro_batch_tokens == 16_384 and config.generator.step_sequences == 64  # type: ignore[attr-defined]
    plain = inputs(
        "qwen3-4b", "h200", f"{MEGATRON}.recompute_granularity=null", "trainer.max_tokens_per_microbatch=8192"
    )
    assert not {"recompute_granularity", "max_tokens_per_microbatch"} & values(plain).keys()


def test_models_whose_recomputation_is_open_follow_the_policy_and_others_keep_theirs():
    kept = "trainer.ref.megatron_config.recompute_granularity=null"
    config = chosen(inputs("qwen3-4b", "h100", kept, "trainer.algorithm.advantage_estimator=gae")).config
    trainer: Any = config.trainer
    assert trainer.policy.megatron_config.recompute == trainer.critic.megatron_config.recompute == "full"
    assert trainer.ref.megatron_config.recompute is None


def test_a_sample_longer_than_any_micro_batch_is_one_of_its_own():
    given = inputs("qwen3-0.6b", "h200", "generator.sampling_params.max_generate_length=40000")
    assert values(given)["max_tokens_per_microbatch"] == 40_512


def test_context_parallel_ranks_share_a_micro_batch():
    given = inputs("qwen3-0.6b", "h200", f"{RANKS}=2", f"{MEGATRON}.context_parallel_size=2")
    assert values(given)["max_tokens_per_microbatch"] == 2 * 32_768


@pytest.mark.parametrize(
    ("overrides", "sequences"),
    [
        ([], 512),  # of 1,024 prompts with 5 samples
        (["trainer.train_batch_size=16", "generator.num_inference_engines=2"], 48),  # 80 / 2 and 5 more: 45
        (["trainer.train_batch_size=16", "trainer.source=streaming"], 168),  # two batches of 80 and 5: 165
        (["trainer.train_batch_size=64", "trainer.source=streaming"], 520),  # 645 and more are no faster than 512
        (["trainer.train_batch_size=64", "trainer.source=streaming", "trainer.verify_sync_every=0"], 512),
        (["trainer.train_batch_size=64", "trainer.source=streaming", "trainer.max_staleness=0"], 328),
        (["trainer.train_batch_size=16", *EVALUATED], 304),  # 300 and 1
        (["trainer.train_batch_size=16", "generator.enable_http_endpoint=true"], 512),
        (["trainer.train_batch_size=16", "generator.rollout=a:b"], 512),
        (["trainer.train_batch_size=16", "trainer.algorithm.advantage_estimator=remax"], 104),  # 16 x 6 and 6: 102
        (["trainer.train_batch_size=16", "trainer.source=streaming", *EVALUATED], 472),  # 165 and 301 more: 466
    ],
)
def test_an_engine_takes_as_many_sequences_as_it_may_get(overrides: list[str], sequences: int):
    small = ["trainer.policy_mini_batch_size=16"] if overrides else []
    assert values(inputs("qwen3-0.6b", "h100", *small, *overrides))["max_num_seqs"] == sequences


def test_more_than_512_sequences_have_to_be_faster():
    """Each of them costs a step time, so they only pay where the step is long without them: 61 GB of experts."""
    dense, experts = chosen(inputs("qwen3-4b", "h200")), chosen(inputs("qwen3-30b-a3b", "h200"))
    assert (
        "max_num_seqs=512, because an engine may get 5,125 samples at once, and 1,024 at once would be 1.03 times"
        in (choices_line(dense))
    )
    assert (
        "max_num_seqs=1024, because an engine may get 5,125 samples at once, and 1,024 at once would be 1.32 times"
        in (choices_line(experts))
    )


@pytest.mark.parametrize(("shape", "tokens"), [("qwen3-0.6b", 16_384), ("qwen3-4b", 8_192), ("qwen3-30b-a3b", 8_192)])
def test_a_step_over_prompts_is_arithmetic(shape: str, tokens: int):
    """2 FLOPs for each of 596 million weights and 8,192 tokens are 16 ms at 60 % of 989 TFLOP/s, less than 4 x 6."""
    assert values(inputs(shape, "h100"))["max_num_batched_tokens"] == tokens


def test_what_was_chosen_is_printed_in_one_line_with_reasons():
    line = choices_line(chosen(inputs("qwen3-4b", "h200")))
    assert line.startswith(
        "chose   for H200: enforce_eager=false, because GPUs can run CUDA graphs; max_num_seqs=512, because"
    )
    assert (
        "max_tokens_per_microbatch=8192, recompute_granularity=null, because recomputing nothing with 8,192 tok" in line
    )
    assert "of 139.8 GiB, errors included, and recomputing nothing with 32,768 tokens 22" in line and "\n" not in line


LONG = ["trainer.max_prompt_length=4096", "generator.sampling_params.max_generate_length=28672"]


def test_no_more_layers_are_recomputed_whole_than_memory_needs():
    """One sample of 32,768 tokens: 14 layers that keep 117,888 bytes per token and 22 that keep 5,120 are 53.8 GiB,
    59.2 with the error; weights, gradients and Adam 67.4, and what weight syncs keep 1.5."""
    given = inputs("qwen3-4b", "h200", *LONG)
    assert values(given)["recompute_num_layers"] == 22
    assert "because recomputing 22 layers with 32,768 tokens needs 137.1 of 139.8 GiB" in choices_line(chosen(given))
    megatron = chosen(given).config.trainer.policy.megatron_config
    fits = [_option(given, replace(megatron, recompute_num_layers=num), 32_768).fits for num in (21, 22, 23)]
    assert fits == [False, True, True]


def test_micro_batches_are_filled_with_samples_shorter_than_the_longest():
    """One sample of 17,000 tokens and shorter ones are 32,768 tokens; two of 17,000 would be too many."""
    updates = []
    for longest in (16_384, 17_000):
        length = f"generator.sampling_params.max_generate_length={longest - 512}"
        made = forecast(inputs("qwen3-4b", "h200", "trainer.max_tokens_per_microbatch=32768", length))
        updates.append(next(phase for phase in made.phases if phase.phase == "update"))
    assert updates[0] == updates[1]


def test_whole_multiples_of_the_longest_sample_are_tried():
    """Two of 7,000 tokens fit where a micro-batch of 16,384 does not."""
    found = values(inputs("qwen3-4b", "h200", "generator.sampling_params.max_generate_length=6488"))
    assert found["max_tokens_per_microbatch"] == 14_000


def recomputed_layers(*overrides: str) -> tuple[int | None, int | None]:
    """Of the policy and the critic, after the choice."""
    trainer: Any = chosen(inputs("qwen3-4b", "h200", *LONG, *overrides)).config.trainer
    return tuple(model.megatron_config.recompute_num_layers for model in (trainer.policy, trainer.critic))


def test_numbers_of_layers_that_are_given_are_kept():
    assert recomputed_layers(f"{MEGATRON}.recompute_num_layers=30")[0] == 30
    assert recomputed_layers(f"{MEGATRON}.recompute_granularity=full")[0] is None
    gae = "trainer.algorithm.advantage_estimator=gae"
    follows = recomputed_layers(gae)
    assert follows[0] == follows[1]
    assert recomputed_layers(gae, "trainer.critic.megatron_config.recompute_num_layers=36")[1] == 36
    small = chosen(inputs("qwen3-0.6b", "h100", f"{MEGATRON}.recompute_num_layers=10")).config.trainer.policy
    assert small.megatron_config.recompute is small.megatron_config.recompute_num_layers is None


def test_stages_of_a_pipeline_recompute_as_many_layers_each():
    """Four stages of 10, 10, 10 and 6 layers: with 8 a long stage takes 1 + 0.8 / 3 times as long, the short one, of
    which all are recomputed, 4 / 3 times; the long ones remain the slowest."""
    given = inputs("qwen3-8b", "h100", f"{RANKS}=4", f"{MEGATRON}.pipeline_model_parallel_size=4")
    many = replace(given.config.trainer, max_tokens_per_microbatch=16_384)
    given = replace(given, config=replace(given.config, trainer=many))
    assert values(given)["recompute_num_layers"] == 8
    megatron = chosen(given).config.trainer.policy.megatron_config
    some, none = (_option(given, replace(megatron, recompute_granularity=level), 16_384) for level in ("full", None))
    assert some.seconds / none.seconds == pytest.approx(1 + 0.8 / 3)


def test_where_nothing_fits_for_sure_the_least_memory_is_taken():
    given = inputs("qwen3-8b", "h100")
    assert values(given)["recompute_granularity"] == "full" and values(given)["max_tokens_per_microbatch"] == 3_072
    assert "because nothing fits for sure, and recomputing everything with 3,072 tokens" in choices_line(chosen(given))


def test_fine_tuning_has_no_engine_to_choose_for():
    config = load_sft_config(["trainer.policy.model.path=qwen3-4b"])
    kind = device_kind("h200")
    assert kind is not None
    made = chosen(Inputs(config, {"qwen3-4b": model_config("qwen3-4b")}, kind, workload_of(config))).made
    assert {key for choice in made for key, _ in choice.values if key.startswith("generator")} == set()
    assert made


def test_without_a_gpu_open_keys_mean_what_they_always_meant():
    config = PLAN.load([])
    assert (config.trainer.micro_batch_tokens, config.trainer.policy.megatron_config.recompute) == (16_384, None)
    assert (config.generator.step_sequences, config.generator.step_tokens) == (1_024, 8_192)
    selective = PLAN.load([f"{MEGATRON}.recompute_granularity=selective"]).trainer.policy.megatron_config
    assert selective.recomputed == ("core_attn",)


def test_conversations_may_be_as_long_as_their_input_and_a_response():
    """Of one turn a sample has 512 + 1,024 tokens, of eight up to 30,000 + 1,024."""
    long = ["generator.max_turns=8", "generator.max_input_length=30000"]
    assert inputs("qwen3-4b", "h100", f"{RANKS}=2").workload.sample_tokens == 1536
    found = inputs("qwen3-4b", "h100", f"{RANKS}=2", *long)
    assert found.workload.sample_tokens == 31_024
    assert values(found)["max_tokens_per_microbatch"] >= 31_024


def test_frozen_models_recompute_nothing_and_a_critic_what_its_layers_have():
    given = inputs("qwen3-30b-a3b", "h100", "trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=c")
    given = replace(given, models={**given.models, "c": model_config("qwen3-0.6b")})
    megatron = given.config.trainer.policy.megatron_config
    policy = replace(megatron, recompute_granularity="selective", recompute_modules=("layernorm", "moe_act"))
    trainer: Any = _option(given, policy, 4_096).config.trainer
    assert trainer.critic.megatron_config.recompute_modules == ("layernorm",)
    assert trainer.ref.megatron_config.recompute is trainer.teacher.megatron_config.recompute is None


def test_an_empty_list_of_modules_leaves_out_the_selective_level():
    found = values(inputs("qwen3-8b", "h100", f"{RANKS}=8", f"{MEGATRON}.recompute_modules=[]"))
    assert found["recompute_granularity"] != "selective"


SHARED = "trainer.placement.colocate_all=true"
STEP = [
    *(SHARED, "trainer.train_batch_size=64", "trainer.policy_mini_batch_size=64", "trainer.max_prompt_length=128"),
    *("generator.n_samples_per_prompt=8", "generator.sampling_params.max_generate_length=512"),
    "trainer.algorithm.use_kl_loss=false",
]


@pytest.mark.parametrize(
    ("shape", "overrides", "release", "cache_gb"),
    [
        # A token of the cache takes 28 layers x 4,096 bytes: 35.07 GiB for 513 samples of 640 tokens.
        ("qwen3-0.6b", [], "none", 35.1),
        # Weights, gradients and optimizer take 67.4 GiB, activations 30.1, the engine 7.5 and its cache 45.1.
        ("qwen3-4b", [], "offload", None),
        ("qwen3-0.6b", ["generator.engine_init_kwargs.kv_cache_dtype=fp8"], "none", 17.6),
        ("qwen3-0.6b", ["generator.kv_cache_memory_gb=20"], "none", None),
        ("qwen3-0.6b", ["generator.kv_cache_memory_gb=60"], "offload", None),
        ("qwen3-0.6b", ["generator.gpu_memory_utilization=0.2"], "none", None),
        ("qwen3-0.6b", ["generator.gpu_memory_utilization=0.9"], "offload", None),
        ("qwen3-0.6b", ["generator.enable_http_endpoint=true"], "offload", None),
        ("qwen3-0.6b", ["generator.engine_init_kwargs.num_gpu_blocks_override=99999"], "offload", None),
        (
            "qwen3-0.6b",
            ["generator.engine_init_kwargs.kv_cache_memory_bytes=120000000000", "generator.gpu_memory_utilization=0.2"],
            "offload",
            None,
        ),
        ("qwen3-0.6b", ["generator.engine_init_kwargs.speculative_config={method: ngram}"], "offload", None),
        ("qwen3-0.6b", ["generator.backend=own:Engine"], "offload", None),
        ("qwen3-0.6b", ["trainer.source=streaming"], "offload", None),
        ("qwen3-0.6b", ["trainer.source=streaming", "trainer.max_staleness=0"], "none", 35.1),
        # What vLLM may not take is the trainers'.
        ("qwen3-0.6b", ["generator.gpu_memory_utilization=0.3", "generator.kv_cache_memory_gb=20"], "none", None),
        # A sequence alone takes 40,960 x 114,688 bytes, 4.4 GiB, and 5 of them are 21.9.
        (
            "qwen3-0.6b",
            [
                *("trainer.train_batch_size=1", "trainer.policy_mini_batch_size=1", "generator.n_samples_per_prompt=2"),
                "generator.engine_init_kwargs.max_model_len=40960",
            ],
            "none",
            21.9,
        ),
    ],
)
def test_all_stay_on_shared_devices_if_they_fit_for_sure(
    shape: str, overrides: list[str], release: str, cache_gb: float | None
):
    given = inputs(shape, "h200", *STEP, *overrides)
    found = values(given)
    assert (found["release"], found.get("kv_cache_memory_gb")) == (release, cache_gb)
    made = forecast(replace(given, config=chosen(given).config))
    assert made.fits
    if release == "none":
        assert made.fullest.high <= 0.9 * made.capacity and not made.host_bytes


def test_a_service_counts_full_micro_batches_and_takes_turns():
    few = ["trainer.train_batch_size=1", "trainer.policy_mini_batch_size=1", "generator.kv_cache_memory_gb=10"]
    given = inputs("qwen3-4b", "h200", *STEP, *few)
    # 8 samples of 640 tokens are the largest micro-batch there is.
    assert values(given)["max_tokens_per_microbatch"] == 32_768
    found = values(replace(given, any_samples=True))
    assert (found["max_tokens_per_microbatch"], found["release"]) == (8_192, "offload")
    for own in (["generator.step_wise_trajectories=true", "generator.max_turns=2"], ["generator.rollout=a:b"]):
        assert values(inputs("qwen3-4b", "h200", *STEP, *few, *own))["max_tokens_per_microbatch"] == 8_192


def test_the_largest_rank_has_the_samples_that_do_not_divide():
    config = inputs("qwen3-0.6b", "h200", f"{RANKS}=2")
    odd = replace(config, workload=replace(config.workload, samples=3))
    longest = odd.workload.sample_tokens
    layout = Layout(odd.config.trainer.policy.megatron_config, 2)
    largest = largest_pass(replace(odd, config=_with_tokens(odd.config, 2 * longest)), layout, 1024)
    assert (largest.tokens, largest.micro_batches) == (2 * longest, 1)


def _with_tokens(config: Any, tokens: int) -> Any:
    return replace(config, trainer=replace(config.trainer, max_tokens_per_microbatch=tokens))


def test_what_idle_processes_do_is_open_on_shared_devices_alone():
    assert "release" not in values(inputs("qwen3-0.6b", "h200", *STEP[1:]))
    for release in ("none", "offload"):
        given = inputs("qwen3-4b", "h200", *STEP, f"trainer.placement.release={release}")
        assert not {"release", "kv_cache_memory_gb"} & values(given).keys()
    assert load_config([SHARED]).trainer.placement.takes_turns, "without a GPU"
