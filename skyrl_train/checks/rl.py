"""Checks between the values of a configuration of reinforcement learning, all problems at once.

Quick (no Ray, vLLM or Megatron) and without side effects. The rule for a single value is in its field's type (config/).
"""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.algorithms.build import algorithm_problems, build_objective, uses_rollout_logprobs
from skyrl_train.algorithms.tables import KL_ESTIMATORS, compares_samples, needs_whole_samples
from skyrl_train.checks.custom import custom_problems
from skyrl_train.checks.distillation import teacher_problems
from skyrl_train.checks.engines import (
    endpoint_problems,
    engine_problems,
    length_problems,
    training_sampling_problems,
    transport_problems,
)
from skyrl_train.checks.model import model_problems
from skyrl_train.checks.staleness import (
    correction_problems,
    eval_engine_problems,
    kv_cache_problems,
    staleness_problems,
)
from skyrl_train.checks.step import critic_problems, step_problems
from skyrl_train.checks.training import (
    LORA,
    POLICY,
    POLICY_RANKS,
    adapter_problems,
    data_file_problems,
    data_problems,
    layout_problems,
    lora_problems,
    package_problems,
    training_problems,
)
from skyrl_train.config import Config, ConfigError
from skyrl_train.config.algorithm import PLACES, AlgorithmConfig
from skyrl_train.config.policy import MegatronConfig, ScoringModel
from skyrl_train.hf.adapter import slot_problem

UNBIASED = {"k1", "k3"}
"""KL estimators whose product with the ratio has the gradient of the KL divergence."""


def check(config: Config, num_train_prompts: int | None, files: bool = True) -> None:
    """Raise ConfigError with everything that cannot work. Args: num_train_prompts: rows left in the training data, None
    if unknown; files: also check the model folders and data files; False before `trainer.prepare` has created them.
    """
    problems = [*package_problems(config.trainer, _megatron_configs(config)), *key_problems(config, num_train_prompts)]
    if files:
        problems += data_file_problems(config.data)
        problems += model_problems(config)
        problems += adapter_problems(config.trainer.policy.model.lora)
    if problems:
        raise ConfigError(problems)


def key_problems(config: Config, num_train_prompts: int | None = None) -> Iterator[str]:
    """What cannot work on any machine, whatever the sizes of the models."""
    yield from training_problems(config.trainer, _megatron_configs(config))
    yield from custom_problems(config)
    yield from data_problems(config.data)
    yield from step_problems(config, num_train_prompts)
    yield from eval_engine_problems(config)
    yield from critic_problems(config)
    yield from _limits(config)
    yield from _colocation(config)
    yield from _layouts(config)
    yield from _terms(config.trainer.algorithm)
    yield from correction_problems(config.trainer)
    yield from _rewards(config)
    yield from _objective(config)
    yield from staleness_problems(config)
    yield from kv_cache_problems(config)
    yield from training_sampling_problems(config.generator.sampling_params)
    yield from transport_problems(config)
    yield from engine_problems(config)
    yield from endpoint_problems(config)
    yield from lora_problems(config.trainer.policy.model.lora)
    yield from _lora(config)


def _megatron_configs(config: Config) -> dict[str, MegatronConfig]:
    """Key -> layout of each started model; another model's only if it differs from the policy's."""
    policy = config.trainer.policy.megatron_config
    others = {f"{model.key}.megatron_config": model.megatron_config for model in config.trainer.scoring_models}
    return {POLICY: policy} | {key: layout for key, layout in others.items() if layout != policy}


def _terms(algorithm: AlgorithmConfig) -> Iterator[str]:
    """Settings of the KL and entropy terms that exclude each other or change nothing."""
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        yield (
            "trainer.algorithm.use_kl_loss and use_kl_in_reward are both true: the KL term would count twice. Set one "
            "of them to false"
        )
    if algorithm.use_unbiased_kl and not algorithm.use_kl_loss:
        yield (
            "trainer.algorithm.use_unbiased_kl is true: it multiplies the KL term of the loss, and use_kl_loss is "
            "false. Set use_unbiased_kl=false or use_kl_loss=true"
        )
    estimator, is_in_loss = algorithm.kl_estimator_type, algorithm.use_kl_loss and algorithm.kl_loss_coef
    if is_in_loss and estimator == "k1" and not algorithm.use_unbiased_kl:
        yield (
            "trainer.algorithm.kl_estimator_type is k1: the expected gradient of this KL term of the loss is 0. Use k2 "
            "or k1+, or set use_unbiased_kl=true"
        )
    if is_in_loss and algorithm.use_unbiased_kl and estimator in set(KL_ESTIMATORS) - UNBIASED:
        yield (
            f"trainer.algorithm.use_unbiased_kl is true and kl_estimator_type is {estimator}: the gradient of the "
            "ratio times this estimate is not that of the KL divergence. Set kl_estimator_type=k3"
        )
    if algorithm.kl_ctrl.type == "adaptive" and not algorithm.use_kl_in_reward:
        yield (
            "trainer.algorithm.kl_ctrl.type is adaptive: it changes the weight of a KL penalty in the reward, which is "
            "off. Set trainer.algorithm.use_kl_in_reward=true, or kl_ctrl.type=fixed"
        )
    elif algorithm.kl_ctrl.type == "adaptive" and algorithm.kl_loss_coef == 0:
        yield (
            "trainer.algorithm.kl_loss_coef is 0 and kl_ctrl.type is adaptive: the weight is multiplied after each "
            "step, so it would stay 0. Set kl_loss_coef to its first value, such as 0.001"
        )
    if algorithm.adaptive_entropy.target_entropy is not None and not algorithm.use_entropy_loss:
        yield (
            "trainer.algorithm.adaptive_entropy.target_entropy is set: it changes the weight of an entropy term, which "
            "is off. Set trainer.algorithm.use_entropy_loss=true, or target_entropy=null"
        )
    unread = {"gdpo": "reads named rewards alone, without the penalty", "zero": "reads no reward, nor the penalty"}
    if algorithm.use_kl_in_reward and algorithm.advantage_estimator in unread:
        yield (
            f"trainer.algorithm.use_kl_in_reward is true: {algorithm.advantage_estimator} "
            f"{unread[algorithm.advantage_estimator]}. Set "
            "use_kl_in_reward=false; use_kl_loss=true adds the KL term to the loss"
        )


def _rewards(config: Config) -> Iterator[str]:
    """Settings of overlong responses and dynamic sampling that the run cannot apply."""
    algorithm = config.trainer.algorithm
    buffer, longest = algorithm.overlong_buffer.len, config.generator.sampling_params.max_generate_length
    if buffer is not None and buffer > longest:
        yield (
            f"trainer.algorithm.overlong_buffer.len is {buffer}: it is above "
            f"generator.sampling_params.max_generate_length {longest}. Set it to at most that value"
        )
    filters = {
        "zero_variance_filter": algorithm.zero_variance_filter,
        "dynamic_sampling": algorithm.dynamic_sampling.type,
    }
    if config.generator.n_samples_per_prompt == 1 and (used := [name for name, value in filters.items() if value]):
        yield (
            f"trainer.algorithm.{used[0]} is set and generator.n_samples_per_prompt is 1: the reward of one sample "
            "differs from no other, so no group would be left out. Remove the key, or sample several"
        )
    if algorithm.dynamic_sampling.type == "replace" and config.trainer.source == "streaming":
        yield (
            "trainer.algorithm.dynamic_sampling.type is replace: a streaming source replaces each group by another as "
            "soon as it ends, so no group needs a copy. Set it to filter or null"
        )
    elif algorithm.dynamic_sampling.type is not None and config.trainer.source not in ("on_policy", "streaming"):
        yield (
            f"trainer.algorithm.dynamic_sampling.type is {algorithm.dynamic_sampling.type}: only the sources "
            f"on_policy and streaming apply it, and trainer.source is {config.trainer.source}. Set it to null"
        )


def _objective(config: Config) -> Iterator[str]:
    """Problems of the objective's terms, and what they need of sampling, layout and teacher."""
    algorithm = config.trainer.algorithm
    has_teacher = config.trainer.teacher.is_there
    problems = list(algorithm_problems(algorithm.values, algorithm.parameters, PLACES, has_teacher=has_teacher))
    yield from teacher_problems(config)
    yield from problems
    is_stale = config.trainer.source == "streaming" and config.trainer.staleness > 0
    if is_stale and not problems and not uses_rollout_logprobs(build_objective(algorithm.values, 1.0)):
        yield (
            f"trainer.algorithm.corrections is {list(algorithm.corrections)}: with trainer.max_staleness "
            f"{config.trainer.staleness} samples are of older weights, which neither {algorithm.policy_loss_type} nor "
            "a correction accounts for. Remove the key (the default is [token_tis]), or set max_staleness=0"
        )
    context = config.trainer.policy.megatron_config.context_parallel_size
    if not problems and context > 1 and needs_whole_samples(algorithm.policy_loss_type):
        yield (
            f"{POLICY}.context_parallel_size is {context}: {algorithm.policy_loss_type} reads complete responses, and "
            "a rank would have a part of each. Set it to 1, or use a loss per token (docs/extending.md)"
        )
    samples = config.generator.n_samples_per_prompt
    if not problems and compares_samples(algorithm.advantage_estimator) and samples < 2:
        yield (
            f"generator.n_samples_per_prompt is {samples}: {algorithm.advantage_estimator} compares the samples of a "
            "prompt with each other. Set it to at least 2"
        )


def _limits(config: Config) -> Iterator[str]:
    generator, trainer = config.generator, config.trainer
    bounds, key = trainer.logprob_difference, "trainer.logprob_difference"
    if bounds.warn is not None and bounds.fail is not None and bounds.fail < bounds.warn:
        yield f"{key}.fail is {bounds.fail:g}: it is below {key}.warn {bounds.warn:g}. Set it to at least that value"
    yield from length_problems(config)
    if generator.weight_sync_timeout_s > trainer.timeout_s:
        yield (
            f"generator.weight_sync_timeout_s is {generator.weight_sync_timeout_s:g}: longer than trainer.timeout_s "
            f"{trainer.timeout_s:g}, the timeout of the policy's part of a sync. Lower weight_sync_timeout_s or raise "
            "timeout_s"
        )


def _colocation(config: Config) -> Iterator[str]:
    place, generator = config.trainer.placement, config.generator
    shared = "trainer.placement.colocate_all is true"
    if not place.colocate_all:
        return
    if not generator.run_engines_locally:
        yield (
            f"{shared} and generator.run_engines_locally is false: remote servers cannot share devices with the "
            "trainer. Set colocate_all=false or run_engines_locally=true"
        )
        return
    ranks = place.num_policy_ranks
    engines, tp = generator.num_inference_engines, generator.inference_engine_tensor_parallel_size
    if ranks != engines * tp:
        yield (
            f"{shared} with {ranks} policy ranks and generator.num_inference_engines {engines} x "
            f"inference_engine_tensor_parallel_size {tp} = {engines * tp} engine ranks: every device hosts one policy "
            "rank and one engine rank. Make the numbers equal"
        )
    for model in config.trainer.scoring_models:
        if model.num_ranks != ranks:
            yield (
                f"{shared} with {ranks} policy ranks and {model.num_ranks} {model.name} ranks: the numbers must match. "
                f"Remove {model.ranks_key.replace(' * ', ' and ')} from the configuration"
            )


def _lora(config: Config) -> Iterator[str]:
    lora, base, ref = config.trainer.policy.model.lora, config.trainer.policy.model.path, config.trainer.ref.model.path
    if lora.rank == 0:
        return
    if config.trainer.algorithm.needs_reference and ref != base:
        yield (
            f"trainer.ref.model.path is {ref}: with {LORA}.rank above 0 the reference is the policy's model without "
            "its adapters. Remove trainer.ref.model.path"
        )
    if lora.sync != "adapter":
        return
    if problem := slot_problem(lora.rank):
        yield problem
    if not config.generator.run_engines_locally:
        yield (
            f"{LORA}.sync is adapter and generator.run_engines_locally is false: adapters can only be sent to engines "
            f"that are started locally. Set {LORA}.sync=merged"
        )


def _layouts(config: Config) -> Iterator[str]:
    policy, num_ranks = config.trainer.policy.megatron_config, config.trainer.placement.num_policy_ranks
    yield from layout_problems(policy, POLICY, num_ranks, POLICY_RANKS)
    for model in config.trainer.scoring_models:
        # They follow the policy unless their keys are set: a problem of both is reported once.
        if (model.megatron_config, model.num_ranks) != (policy, num_ranks):
            key = f"{model.key}.megatron_config"
            yield from layout_problems(model.megatron_config, key, model.num_ranks, model.ranks_key)
        if not model.is_trained:  # the critic has micro-batches of its own
            yield from _schedule_problems(policy, model)


def _schedule_problems(policy: MegatronConfig, model: ScoringModel) -> Iterator[str]:
    own, vpp = model.megatron_config, model.megatron_config.virtual_pipeline_model_parallel_size
    multiple = 1 if policy.virtual_pipeline_model_parallel_size is None else policy.pipeline_model_parallel_size
    if vpp is not None and multiple % own.pipeline_model_parallel_size:
        yield (
            f"{model.key}.megatron_config.virtual_pipeline_model_parallel_size is {vpp}: an interleaved schedule needs "
            f"a multiple of {own.pipeline_model_parallel_size} micro-batches, and the policy's, which it scores, are a "
            f"multiple of {multiple}. Set it to null"
        )
