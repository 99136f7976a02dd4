"""A run that surely cannot fit is refused with a proposal that fits; a run within the error is not."""

from __future__ import annotations

from dataclasses import replace
from io import StringIO

import pytest
from rich.console import Console

from skyrl_train.checks.rl import check
from skyrl_train.config import ConfigError
from skyrl_train.config.rl import PLAN
from skyrl_train.device.kinds import device_kind
from skyrl_train.entrypoints.plan.plan import plan
from skyrl_train.forecast.choices.chosen import chosen
from skyrl_train.forecast.fit import fitted, fitted_for_evaluation
from skyrl_train.forecast.forecast import Forecast, Inputs, forecast, workload_of
from skyrl_train.forecast.parts import GIB
from skyrl_train.forecast.proposals import proposals
from skyrl_train.forecast.report import proposal_lines, proposal_table, refusal
from skyrl_train.forecast.shapes import model_config
from skyrl_train.forecast.sharing import OF_STEPS

LAYOUT = "trainer.policy.megatron_config"


def inputs(shape: str, device: str, *overrides: str) -> Inputs:
    config = PLAN.load([f"trainer.policy.model.path={shape}", *overrides])
    kind = device_kind(device)
    assert kind is not None
    return Inputs(config, {shape: model_config(shape)}, kind, workload_of(config))


@pytest.mark.parametrize(
    ("shape", "least", "override"),
    [
        ("qwen3-8b", "21", f"{LAYOUT}.optimizer_cpu_offload=true"),
        ("qwen3-30b-a3b", "59", "trainer.placement.policy_num_gpus_per_node=4"),
    ],
)
def test_a_job_that_cannot_fit_is_refused_with_one_that_fits(shape: str, least: str, override: str):
    given = inputs(shape, "h200")
    made, found = forecast(given), proposals(given)
    assert [phase.phase for phase in made.impossible] == ["update"]
    message = refusal(made, found)
    assert f"update needs at least {least}" in message and "GiB of a device with 139.8 GiB" in message
    assert override in message
    config = PLAN.load([f"trainer.policy.model.path={shape}", *found[0].overrides])
    larger = replace(given, config=config, workload=workload_of(config))
    assert forecast(replace(larger, config=chosen(larger).config)).fits


def test_moments_on_the_host_take_eight_bytes_per_parameter_from_the_device_and_time():
    kept = forecast(inputs("qwen3-4b", "h200", "trainer.max_tokens_per_microbatch=8192"))
    moved = forecast(
        inputs("qwen3-4b", "h200", "trainer.max_tokens_per_microbatch=8192", f"{LAYOUT}.optimizer_cpu_offload=true")
    )
    updates = [next(phase for phase in made.phases if phase.phase == "update") for made in (kept, moved)]
    bytes_of = [{part.name: part.likely for part in update.parts}["optimizer"] for update in updates]
    parameters = bytes_of[0] / 12
    assert bytes_of[1] == pytest.approx(4 * parameters) and moved.host_bytes == pytest.approx(8 * parameters)
    assert kept.host_bytes == 0.0
    seconds = [next(t.seconds for t in made.times if t.phase == "update") for made in (kept, moved)]
    assert seconds[1] - seconds[0] == pytest.approx(4 * 8 * parameters / 45e9), "four mini-batches, both ways at once"


def test_recomputation_is_proposed_where_activations_do_not_fit():
    given = inputs("qwen3-4b", "h200", "trainer.max_tokens_per_microbatch=32768")
    assert not forecast(given).fits
    assert proposals(given)[0].overrides in (
        ("trainer.max_tokens_per_microbatch=16384",),  # with the cheap part recomputed
        ("trainer.max_tokens_per_microbatch=8192",),
    )


def test_a_layout_that_fits_is_not_refused():
    made = forecast(inputs("qwen3-0.6b", "h200"))
    assert made.fits and not made.impossible


def test_an_estimate_within_its_error_never_refuses():
    given = inputs("qwen3-4b", "h200")
    phase = next(phase for phase in forecast(given).phases if phase.phase == "update")
    between = (phase.low + phase.likely) / 2 / 2**30
    tight = forecast(replace(given, device=replace(given.device, memory_gib=between)))
    assert not tight.fits and not [each for each in tight.impossible if each.phase == "update"]


def test_shared_devices_hold_what_others_leave_behind():
    sharing = "trainer.placement.colocate_all=true"
    shared = forecast(inputs("qwen3-0.6b", "h200", sharing))
    alone = forecast(inputs("qwen3-0.6b", "h200"))
    names = {phase.phase: [part.name for part in phase.parts] for phase in shared.phases}
    assert "sleeping engine" in names["update"] and "offloaded trainers" in names["generation"]
    assert "weights of the policy" in names["weight sync"]
    # 2 bytes of weights and 12 of optimizer state for each parameter, and the reference's weights.
    assert shared.host_bytes == pytest.approx(16 * 0.596e9, rel=0.01) and alone.host_bytes == 0
    # On each of two nodes one rank, with half of the optimizer state.
    on_nodes = forecast(inputs("qwen3-0.6b", "h200", sharing, "trainer.placement.policy_num_nodes=2"))
    assert on_nodes.host_bytes == pytest.approx(10 * 0.596e9, rel=0.01)


@pytest.mark.parametrize(("response", "longest"), [(64, "update"), (4096, "generation")])
def test_engines_of_their_own_generate_beside_a_streaming_run(response: int, longest: str):
    length = f"generator.sampling_params.max_generate_length={response}"
    streaming = "trainer.source=streaming"
    in_turns = forecast(inputs("qwen3-0.6b", "h200", length))
    beside = forecast(inputs("qwen3-0.6b", "h200", length, streaming))
    assert beside.times == in_turns.times
    seconds = {time.phase: time.seconds for time in in_turns.times}
    assert in_turns.seconds == pytest.approx(sum(seconds.values()))
    rest = sum(seconds.values()) - seconds["generation"]
    assert beside.seconds == pytest.approx(
        rest if longest == "update" else seconds["generation"] + seconds["weight sync"]
    )
    for other in ("trainer.max_staleness=0", "trainer.placement.colocate_all=true"):
        assert not forecast(inputs("qwen3-0.6b", "h200", streaming, other)).overlaps


@pytest.mark.parametrize(
    ("shape", "samples", "prompt", "response", "seconds"),
    [("qwen3-0.6b", 512, 128, 512, 6.14), ("qwen3-8b", 512, 128, 512, 12.55), ("qwen3-4b", 256, 128, 1920, 36.3)],
)
def test_generation_takes_about_as_long_as_measured(
    shape: str, samples: int, prompt: int, response: int, seconds: float
):
    given = inputs(
        shape,
        "h200",
        f"trainer.train_batch_size={samples // 8}",
        f"trainer.policy_mini_batch_size={samples // 8}",
        "generator.n_samples_per_prompt=8",
        f"trainer.max_prompt_length={prompt}",
        f"generator.sampling_params.max_generate_length={response}",
    )
    times = {time.phase: time.seconds for time in forecast(given).times}
    assert times["generation"] == pytest.approx(seconds, rel=0.15)


def applied(given: Inputs, shape: str, *overrides: str) -> Inputs:
    """The configuration with the overrides of a proposal on its command line."""
    config = PLAN.load([f"trainer.policy.model.path={shape}", *overrides])
    return replace(given, config=config, workload=workload_of(config))


@pytest.mark.parametrize(
    ("shape", "overrides"),
    [
        ("qwen3-30b-a3b", ["trainer.placement.policy_num_nodes=2"]),
        ("qwen3-8b", [f"{LAYOUT}.recompute_granularity=full", "trainer.placement.ref_num_gpus_per_node=3"]),
        (
            "qwen3-30b-a3b",
            [
                "trainer.placement.policy_num_gpus_per_node=3",
                "trainer.placement.colocate_all=true",
                "generator.num_inference_engines=3",
            ],
        ),
        (
            "qwen3-4b",
            [
                "trainer.placement.policy_num_gpus_per_node=4",
                f"{LAYOUT}.pipeline_model_parallel_size=2",
                f"{LAYOUT}.transformer_config_kwargs={{num_layers_in_first_pipeline_stage: 18}}",
            ],
        ),
    ],
    ids=["several nodes", "reference of other size", "shared devices", "own stages"],
)
def test_a_proposal_on_the_command_line_is_the_configuration_that_was_forecast(shape: str, overrides: list[str]):
    given = inputs(shape, "h100", *overrides)
    found = proposals(given)
    assert found
    for each in found[:3]:
        with_proposal = applied(given, shape, *overrides, *each.overrides)
        check(with_proposal.config, None, files=False)  # type: ignore[arg-type]
        made = forecast(replace(with_proposal, config=chosen(with_proposal).config))
        assert made.fits and made.seconds == pytest.approx(each.forecast.seconds)
        if "transformer_config_kwargs" in overrides[-1]:
            assert made.layout.pp == 2


def test_a_layout_that_the_critic_cannot_have_is_not_proposed():
    critic = ["trainer.algorithm.advantage_estimator=gae", "trainer.critic.model.path=tiny"]
    given = inputs("qwen3-4b", "h200", "trainer.placement.policy_num_gpus_per_node=4", *critic)
    given = replace(given, models={**given.models, "tiny": model_config("tiny")})
    assert {each.forecast.layout.pp for each in proposals(given)} == {1, 2}  # it has two layers


def test_what_idle_trainers_leave_on_shared_devices_depends_on_their_release():
    sharing = ["trainer.placement.colocate_all=true", "trainer.policy.model.lora.rank=8"]
    phases = {}
    for release in ("offload", "none"):
        made = forecast(inputs("qwen3-8b", "h100", *sharing, f"trainer.placement.release={release}"))
        phases[release] = {phase.phase: phase for phase in made.phases}
        assert (made.host_bytes > 0) is (release == "offload")
    low = {release: found["generation"].low / 2**30 for release, found in phases.items()}
    assert low["offload"] < low["none"] - 0.7 * 15.3
    # Weights of the policy and of the engine, with all that both ever take.
    assert phases["none"]["update"].likely == pytest.approx(phases["none"]["generation"].likely)
    assert phases["none"]["update"].likely > phases["offload"]["update"].likely + 15.3 * GIB


def test_a_run_that_keeps_everything_and_cannot_fit_is_told_to_offload():
    keeps = ["trainer.placement.colocate_all=true", "trainer.placement.release=none", "generator.kv_cache_memory_gb=60"]
    made = forecast(inputs("qwen3-4b", "h200", *keeps))
    assert made.impossible and "Set trainer.placement.release=offload" in refusal(made, [])


def test_adapters_that_an_engine_holds_are_counted_beside_trainers():
    adapter = ["trainer.policy.model.lora.rank=64", "generator.kv_cache_memory_gb=4"]
    keeps = ["trainer.placement.colocate_all=true", "trainer.placement.release=none", *adapter]
    parts = {}
    for sync in ("merged", "adapter"):
        made = forecast(inputs("qwen3-8b", "h200", *keeps, f"trainer.policy.model.lora.sync={sync}"))
        parts[sync] = {part.name: part.likely for part in made.phases[0].parts}
    # 36 layers of rank 64 on q, k, v, o (4,096; 1,024), gate, up and down (12,288): 174.6 million elements, twice.
    assert "adapters" not in parts["merged"] and parts["adapter"]["adapters"] == 2 * 2 * 174_587_904


def test_an_engine_fits_into_the_share_of_the_device_that_it_is_given():
    share, shared = "generator.gpu_memory_utilization", "trainer.placement.colocate_all=true"
    for fraction, least, surely in (
        (0.1, False, False),
        (0.15, False, False),
        (0.5, True, True),
        (0.9, True, True),
        (0.96, True, False),  # what is beside the share may not fit
        (1.0, False, False),
    ):
        for overrides in ([f"{share}={fraction}"], [f"{share}={fraction}", shared]):
            made = forecast(inputs("qwen3-8b", "h100", *overrides))
            generation = next(phase for phase in made.phases if phase.phase == "generation")
            assert (generation.low <= made.capacity, generation.high <= made.capacity) == (least, surely)
            if fraction >= 0.5:
                taken = sum(part.likely for part in generation.parts if part.name in OF_STEPS or part.name == "weights")
                assert taken == pytest.approx(fraction * made.capacity)


def test_fp8_engines_are_forecast_with_their_weights_and_refused_where_they_cannot_compute():
    def part(made: Forecast, name: str) -> float:
        return next(part.likely for phase in made.phases for part in phase.parts[:1] if phase.phase == name)

    fp8 = ["generator.quantization=fp8", f"{LAYOUT}.tensor_model_parallel_size=2"]
    ranks = "trainer.placement.policy_num_gpus_per_node=2"
    plain, quantised = (forecast(inputs("qwen3-8b", "h100", ranks, *overrides)) for overrides in (fp8[1:], fp8))
    assert part(plain, "generation") / GIB == pytest.approx(15.26, abs=0.01)
    assert part(quantised, "generation") / GIB == pytest.approx(8.79, abs=0.01)
    assert part(plain, "update") == part(quantised, "update")
    assert quantised.times[0].phase == "generation" and quantised.times[0].seconds < plain.times[0].seconds
    for device in ("h100", "l40s"):
        given = inputs("qwen3-0.6b", device, "generator.quantization=fp8")
        fitted(given.config, given.model, given.device, lambda line: None)
    given = inputs("qwen3-0.6b", "a100", "generator.quantization=fp8")
    command = ["generator.quantization=fp8", "plan.shape=qwen3-0.6b", "plan.device=a100"]
    for fit in (fitted, fitted_for_evaluation, lambda *_: plan(PLAN.load(command), Console(file=StringIO()))):
        with pytest.raises(ValueError, match="fp8 and the GPUs are A100, of compute capability 8.0: .* at least 8.9"):
            fit(given.config, given.model, given.device, lambda line: None)


@pytest.mark.parametrize(
    ("overrides", "problem"),
    [
        (["generator.model_dtype=float32"], "model_dtype is float32"),
        (["generator.run_engines_locally=false"], "run_engines_locally is false"),
        (["trainer.policy.model.lora.rank=8", "trainer.policy.model.lora.sync=adapter"], "has experts"),
    ],
)
def test_plans_reject_what_fp8_engines_of_a_run_would_reject(overrides: list[str], problem: str):
    shape = "qwen3-30b-a3b" if "experts" in problem else "qwen3-0.6b"
    command = ["generator.quantization=fp8", f"plan.shape={shape}", "plan.device=h100", *overrides]
    with pytest.raises(ConfigError, match=f"generator.quantization is fp8.*{problem}"):
        plan(PLAN.load(command), Console(file=StringIO()))


def test_no_layout_of_trainers_is_proposed_for_an_engine_that_cannot_fit():
    given = inputs("qwen3-30b-a3b", "l40s")
    made = forecast(replace(given, config=chosen(given).config))
    assert proposals(given) == []
    only_engine = replace(made, phases=tuple(phase for phase in made.phases if phase.phase == "generation"))
    assert "Raise generator.inference_engine_tensor_parallel_size" in refusal(only_engine, [])


def test_layouts_are_compared_by_what_they_need():
    given = inputs("qwen3-0.6b", "h200", "trainer.placement.policy_num_gpus_per_node=2")
    made = forecast(given)
    assert made.fullest.phase == "update"  # though the KV cache takes all that is free
    console = Console(width=100, record=True, file=StringIO())
    console.print(proposal_table(proposals(given)))
    printed = console.export_text()
    assert "…" not in printed and len({line.split("│")[3] for line in printed.splitlines() if "│" in line}) > 2


@pytest.mark.parametrize(
    "overrides",
    [
        [f"{LAYOUT}.pipeline_model_parallel_size=3", "trainer.placement.policy_num_gpus_per_node=3"],
        [f"{LAYOUT}.tensor_model_parallel_size=2", f"{LAYOUT}.sequence_parallel=false"],
        [f"{LAYOUT}.sequence_parallel=false"],
        [f"{LAYOUT}.tensor_model_parallel_size=8", "trainer.placement.policy_num_gpus_per_node=8"],
    ],
    ids=["three stages", "no sequence parallelism", "nothing that changes", "slow"],
)
def test_the_given_layout_is_compared_and_marked(overrides: list[str]):
    given = inputs("qwen3-0.6b", "h200", "trainer.placement.policy_num_gpus_per_node=2", *overrides)
    found = proposals(given)
    assert [each.overrides for each in found].count(()) == 1
    assert len({each.overrides for each in found}) == len(found)
    assert proposal_lines(found).count("nothing to add") == 1


def test_layouts_are_of_the_nodes_that_the_configuration_names():
    nodes = ["trainer.placement.policy_num_nodes=2", "trainer.placement.policy_num_gpus_per_node=4"]
    larger, many = inputs("qwen3-30b-a3b", "h100", *nodes[:1]), inputs("qwen3-30b-a3b", "h200", *nodes)
    grown = [override for each in proposals(larger) for override in each.overrides if "placement" in override]
    assert set(grown) == {"trainer.placement.policy_num_nodes=16"}
    layouts = [each.forecast.layout for each in proposals(many)]
    assert max(layout.tp * layout.cp for layout in layouts) == 4 and {8} == {layout.num_ranks for layout in layouts}


def test_a_given_number_of_recomputed_layers_ends_no_layout():
    """Layouts that recompute nothing are proposed too, and all layers where the given number does not fit."""
    full, number = f"{LAYOUT}.recompute_granularity=full", f"{LAYOUT}.recompute_num_layers=4"
    found = proposals(inputs("qwen3-8b", "h100", full, number, "trainer.placement.policy_num_gpus_per_node=8"))
    assert any(f"{LAYOUT}.recompute_granularity=null" in each.overrides for each in found)
    assert any(f"{LAYOUT}.recompute_num_layers=null" in each.overrides for each in found)
