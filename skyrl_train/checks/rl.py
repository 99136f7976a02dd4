"""What must hold between the values of a configuration, checked before anything heavy starts, all failures at once.

Here for reinforcement learning; the modules beside have what concerns one part of it, or other programs.
What a value must be by itself stands with its field in config/ and is checked when the configuration is read.

Quick (no Ray, vLLM or Megatron) and without side effects. Every sentence names the key, the value and the cure.
"""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.algorithms.build import algorithm_problems
from skyrl_train.algorithms.tables import compares_samples
from skyrl_train.checks.custom import custom_problems
from skyrl_train.checks.engines import (
    endpoint_problems,
    engine_problems,
    transport_problems,
)
from skyrl_train.checks.lora import lora_problems, lora_reference_problems, lora_sync_problems
from skyrl_train.checks.model import model_problems
from skyrl_train.checks.profiler import restart_problems
from skyrl_train.checks.sampling import training_sampling_problems
from skyrl_train.checks.training import (
    POLICY,
    POLICY_RANKS,
    data_file_problems,
    layout_problems,
    package_problems,
    prepare_problems,
    resume_problems,
)
from skyrl_train.config import Config, ConfigError
from skyrl_train.config.policy import MegatronConfig

REF = "trainer.ref.megatron_config"


def check(config: Config, num_train_prompts: int | None, files: bool = True) -> None:
    """Raise ConfigError with everything that cannot work, or return.

    Args:
        num_train_prompts: rows left in the training data, None where they are not known yet.
        files: also look at the model folders and data files; False before `trainer.prepare` has made them.
    """
    problems = [
        *package_problems(config.trainer, _megatron_configs(config)),
        *prepare_problems(config.trainer),
        *resume_problems(config.trainer),
        *custom_problems(config),
        *_batches(config, num_train_prompts),
        *_algorithm(config),
        *_logprob_difference(config),
        *training_sampling_problems(config.generator.sampling_params),
        *_lengths(config),
        *transport_problems(config),
        *engine_problems(config),
        *lora_reference_problems(config.trainer),
        *endpoint_problems(config),
        *_colocation(config),
        *_deadlines(config),
        *lora_sync_problems(config),
    ]
    problems += _layouts(config)
    if files:
        problems += data_file_problems(config.data)
        problems += model_problems(config)
        problems += lora_problems(config.trainer.policy.model.lora)
    if problems:
        raise ConfigError(problems)


def _megatron_configs(config: Config) -> dict[str, MegatronConfig]:
    """Key -> layout of each model that is started; the reference's only where it has one of its own."""
    policy, ref = config.trainer.policy.megatron_config, config.trainer.ref.megatron_config
    return {POLICY: policy} | ({REF: ref} if config.trainer.starts_reference and ref != policy else {})


def _deadlines(config: Config) -> Iterator[str]:
    sync_s, call_s = config.generator.weight_sync_timeout_s, config.trainer.timeout_s
    if sync_s > call_s:
        yield (
            f"generator.weight_sync_timeout_s={sync_s:g} is longer than trainer.timeout_s={call_s:g}, the deadline of "
            "the policy's whole part in a weight sync: lower the first or raise the second"
        )


def _batches(config: Config, num_train_prompts: int | None) -> Iterator[str]:
    batch, mini = config.trainer.train_batch_size, config.trainer.policy_mini_batch_size
    if batch % mini:
        near = max(divisor for divisor in range(1, min(batch, mini) + 1) if batch % divisor == 0)
        yield (
            f"trainer.train_batch_size is {batch}, not a multiple of trainer.policy_mini_batch_size {mini}: "
            f"set policy_mini_batch_size to a divisor such as {near}"
        )
    if num_train_prompts is not None and batch > num_train_prompts:
        yield (
            f"trainer.train_batch_size is {batch}, more than the {num_train_prompts} prompts of data.train_data: "
            f"set it to at most {num_train_prompts} (prompts over trainer.max_prompt_length are not counted)"
        )


def _algorithm(config: Config) -> Iterator[str]:
    algorithm = config.trainer.algorithm
    if algorithm.use_kl_loss and algorithm.use_kl_in_reward:
        yield "trainer.algorithm.use_kl_loss and use_kl_in_reward are both true: set one of them to false"
    buffer, longest = algorithm.overlong_buffer.len, config.generator.sampling_params.max_generate_length
    if buffer is not None and buffer > longest:
        yield (
            f"trainer.algorithm.overlong_buffer.len is {buffer}: it is above "
            f"generator.sampling_params.max_generate_length {longest}. Set it to at most that value"
        )
    if algorithm.dynamic_sampling.type is not None and config.trainer.source != "on_policy":
        yield (
            f"trainer.algorithm.dynamic_sampling.type is {algorithm.dynamic_sampling.type}: only the source on_policy "
            f"applies it, and trainer.source is {config.trainer.source}. Set it to null"
        )
    problems = list(algorithm_problems(algorithm.values, algorithm.parameters))
    yield from problems
    if problems:
        return
    samples = config.generator.n_samples_per_prompt
    if compares_samples(algorithm.advantage_estimator) and samples < 2:
        yield (
            f"generator.n_samples_per_prompt is {samples}: {algorithm.advantage_estimator} compares the samples of a "
            "prompt with each other, set it to at least 2"
        )


def _logprob_difference(config: Config) -> Iterator[str]:
    limits, key = config.trainer.logprob_difference, "trainer.logprob_difference"
    if limits.warn is not None and limits.fail is not None and limits.fail < limits.warn:
        yield f"{key}.fail is {limits.fail:g}: it is below {key}.warn {limits.warn:g}. Set it to at least that value"


def _lengths(config: Config) -> Iterator[str]:
    generator, prompt = config.generator, config.trainer.max_prompt_length
    if generator.max_input_length < prompt:
        yield (
            f"generator.max_input_length is {generator.max_input_length}, below trainer.max_prompt_length {prompt}: "
            "longer prompts would end before their first turn, set it to at least as much"
        )
    limit = generator.engine_init_kwargs.get("max_model_len")
    longest = generator.longest_conversation
    if limit is not None and longest > limit:
        yield (
            f"generator.max_input_length + max_generate_length is {longest} tokens, more than "
            f"generator.engine_init_kwargs.max_model_len {limit}: lower the first or raise the last"
        )


def _colocation(config: Config) -> Iterator[str]:
    place, generator = config.trainer.placement, config.generator
    if not place.colocate_all:
        if place.release == "exit":
            yield (
                "trainer.placement.release is exit and colocate_all false: trainers with devices of their own keep "
                "them, set colocate_all to true or leave release at offload"
            )
        return
    if place.release == "exit":
        for path, megatron in _megatron_configs(config).items():
            yield from restart_problems(megatron, path)
    if not generator.run_engines_locally:
        yield (
            "trainer.placement.colocate_all is true and generator.run_engines_locally false: servers elsewhere cannot "
            "take turns with the trainer, set one of them the other way"
        )
        return
    ranks = place.num_policy_ranks
    engines, tp = generator.num_inference_engines, generator.inference_engine_tensor_parallel_size
    if ranks != engines * tp:
        yield (
            f"trainer.placement.colocate_all is true with {ranks} policy ranks and generator.num_inference_engines "
            f"{engines} x inference_engine_tensor_parallel_size {tp} = {engines * tp} engine ranks: the numbers must "
            "be equal, each device serves one of either"
        )
    ref_ranks = place.ref_num_nodes * place.ref_num_gpus_per_node
    if config.trainer.starts_reference and ref_ranks != ranks:
        yield (
            f"trainer.placement.colocate_all is true with {ranks} policy ranks and {ref_ranks} reference ranks: the "
            "numbers must be equal, leave ref_num_nodes and ref_num_gpus_per_node away"
        )


def _layouts(config: Config) -> Iterator[str]:
    placement = config.trainer.placement
    policy, ref = config.trainer.policy.megatron_config, config.trainer.ref.megatron_config
    policy_ranks = placement.num_policy_ranks
    ref_ranks = placement.ref_num_nodes * placement.ref_num_gpus_per_node
    yield from layout_problems(policy, POLICY, policy_ranks, POLICY_RANKS)
    # The reference follows the policy unless its keys are given: what is wrong with both is said once.
    if config.trainer.starts_reference and (ref, ref_ranks) != (policy, policy_ranks):
        ref_key = "trainer.placement.ref_num_nodes * ref_num_gpus_per_node"
        yield from layout_problems(ref, REF, ref_ranks, ref_key)
