"""Layouts of as many GPUs that fit, the fastest first; if none does, with the moments on the host, then more GPUs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from skyrl_train.checks.model import engine_size_problems, size_problems
from skyrl_train.checks.rl import key_problems
from skyrl_train.checks.training import POLICY, POLICY_RANKS, layout_problems
from skyrl_train.config import Config
from skyrl_train.config.policy import OWN_STAGES, MegatronConfig
from skyrl_train.config.training import PolicyPlacementConfig, RunConfig
from skyrl_train.forecast.choices.chosen import chosen
from skyrl_train.forecast.forecast import Forecast, Inputs, forecast, with_layout, workload_of
from skyrl_train.forecast.parts import ENGINE
from skyrl_train.hf.matrices import num_experts

SIZES = (1, 2, 4, 8)
FRACTIONS = (1, 2, 4)
"""Divisors of the given trainer.max_tokens_per_microbatch that are tried."""
GPUS_PER_NODE = 8
"""Unless the configuration says more, or fewer for each of several nodes."""
MOST_GPUS = 64


@dataclass(frozen=True, slots=True)
class Proposal:
    """A configuration that fits."""

    overrides: tuple[str, ...]
    """What differs from the given one, beside keys that it leaves open; none for itself."""
    forecast: Forecast


def problems(inputs: Inputs) -> list[str]:
    """Keys of a configuration that contradict each other, or sizes that contradict its models."""
    config, policy = inputs.config, inputs.config.trainer.policy
    shape = inputs.model.to_dict()
    found = list(size_problems(shape, policy.megatron_config, POLICY))
    if not isinstance(config, Config):
        ranks = config.trainer.placement.num_policy_ranks
        return [*layout_problems(policy.megatron_config, POLICY, ranks, POLICY_RANKS), *found]
    for model in config.trainer.scoring_models:
        if (model.model_path, model.megatron_config) != (policy.model.path, policy.megatron_config):
            own = inputs.models[model.model_path].to_dict()
            found += size_problems(own, model.megatron_config, f"{model.key}.megatron_config")
    return [*key_problems(config), *found, *engine_size_problems(shape, config)]


def proposals(inputs: Inputs) -> list[Proposal]:
    """All layouts that fit for sure, the fastest first; of those nearly as fast, the ones that change less."""
    now = forecast(replace(inputs, config=chosen(inputs).config))
    if any(phase.device == ENGINE for phase in now.impossible):
        return []  # whatever the layout of the trainers
    found = _fitting(inputs, ()) or _fitting(inputs, (), moments_on_host=True)
    ranks = inputs.config.trainer.placement.num_policy_ranks
    while not found and ranks < MOST_GPUS:
        ranks *= 2
        larger, overrides = _with_ranks(inputs.config, ranks)
        found = _fitting(replace(inputs, config=larger), overrides)
    return sorted(found, key=lambda each: (round(each.forecast.seconds, 1), len(each.overrides)))


def _fitting(inputs: Inputs, overrides: tuple[str, ...], *, moments_on_host: bool = False) -> list[Proposal]:
    config = inputs.config
    tokens = config.trainer.max_tokens_per_microbatch
    found: list[Proposal] = []
    for megatron in _layouts(inputs, moments_on_host):
        for divisor in FRACTIONS if tokens is not None else (1,):
            trainer = config.trainer
            if tokens is not None:
                if divisor > 1 and tokens // divisor < workload_of(config).sample_tokens:
                    continue
                trainer = replace(trainer, max_tokens_per_microbatch=tokens // divisor)
            changed = replace(inputs, config=with_layout(replace(config, trainer=trainer), megatron))
            if problems(changed):
                break
            fitted = chosen(changed).config
            made = forecast(replace(changed, config=fitted))
            if made.fits:
                given = (*overrides, *_differences(config.trainer.policy.megatron_config, megatron))
                if tokens is not None and divisor > 1:
                    given = (*given, f"trainer.max_tokens_per_microbatch={tokens // divisor}")
                found.append(Proposal(given, made))
                if fitted.trainer.policy.megatron_config.recompute is None:
                    break  # fewer tokens are faster only with less recomputation
    return found


def _layouts(inputs: Inputs, moments_on_host: bool) -> Iterator[MegatronConfig]:
    """The given layout and others for the number of policy ranks; not all are valid."""
    given = inputs.config.trainer.policy.megatron_config
    given = replace(given, optimizer_cpu_offload=given.optimizer_cpu_offload or moments_on_host)
    yield given
    placement = inputs.config.trainer.placement
    ranks, gpus_of_node = placement.num_policy_ranks, gpus_per_node(placement)
    expert_sizes = SIZES if num_experts(inputs.model) else (1,)
    has_own_stages = any(given.transformer_config_kwargs.get(name) for name in OWN_STAGES)
    levels = ("auto",) if given.recompute_granularity == "auto" else (None, "full")
    for tp, pp, cp, ep, recompute in product(SIZES, SIZES, SIZES, expert_sizes, levels):
        if tp * pp * cp > ranks or tp * cp > gpus_of_node:
            continue
        if has_own_stages and pp != given.pipeline_model_parallel_size:
            continue
        is_same = (tp, pp) == (given.tensor_model_parallel_size, given.pipeline_model_parallel_size)
        own = recompute is None and given.recompute == "selective"
        other = replace(
            given,
            tensor_model_parallel_size=tp,
            pipeline_model_parallel_size=pp,
            virtual_pipeline_model_parallel_size=given.virtual_pipeline_model_parallel_size if is_same else None,
            context_parallel_size=cp,
            expert_model_parallel_size=ep,
            expert_tensor_parallel_size=given.expert_tensor_parallel_size if is_same else None,
            sequence_parallel=given.sequence_parallel or tp > 1,
            recompute_granularity="selective" if own else recompute,
            recompute_num_layers=given.recompute_num_layers if recompute == "auto" else None,
        )
        if other != given:
            yield other


def _differences(given: MegatronConfig, other: MegatronConfig) -> list[str]:
    names = [name for name in given.__dataclass_fields__ if getattr(given, name) != getattr(other, name)]
    values = {name: getattr(other, name) for name in names}
    return [f"{POLICY}.{name}={override_text(value)}" for name, value in values.items()]


def override_text(value: object) -> str:
    """A value as the command line has it."""
    if isinstance(value, list):
        return f"[{','.join(map(override_text, value))}]"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _with_ranks(config: RunConfig, ranks: int) -> tuple[RunConfig, tuple[str, ...]]:
    """The configuration with more policy ranks, and those that share devices with them."""
    given = config.trainer.placement
    per_node = min(ranks, gpus_per_node(given))
    nodes = ranks // per_node
    sizes: dict[str, Any] = {}
    overrides = []
    for name in _growing(config):
        of_name = {f"{name}_num_gpus_per_node": per_node, f"{name}_num_nodes": nodes}
        follows = all(getattr(given, key) == getattr(given, key.replace(name, "policy", 1)) for key in of_name)
        for key, value in of_name.items():
            if (name == "policy" and value != getattr(given, key)) or not follows:
                overrides.append(f"trainer.placement.{key}={value}")
        sizes |= of_name
    config = replace(config, trainer=replace(config.trainer, placement=replace(given, **sizes)))
    if isinstance(config, Config) and config.trainer.placement.colocate_all:
        engines = nodes * per_node // config.generator.inference_engine_tensor_parallel_size
        config = replace(config, generator=replace(config.generator, num_inference_engines=engines))
        overrides.append(f"generator.num_inference_engines={engines}")
    return config, tuple(overrides)


def gpus_per_node(placement: PolicyPlacementConfig) -> int:
    """GPUs of a node that models may use: those of the policy if it has several nodes."""
    given = placement.policy_num_gpus_per_node
    return given if placement.policy_num_nodes > 1 else max(given, GPUS_PER_NODE)


def _growing(config: RunConfig) -> list[str]:
    """The policy, and models that have its layout, or its devices."""
    if not isinstance(config, Config):
        return ["policy"]
    trainer = config.trainer
    names = dict.fromkeys(model.section for model in trainer.scoring_models)
    policy, is_shared = trainer.policy.megatron_config, trainer.placement.colocate_all
    return ["policy", *(name for name in names if is_shared or getattr(trainer, name).megatron_config == policy)]
