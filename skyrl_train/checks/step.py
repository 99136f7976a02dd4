"""Checks of how many prompts a step samples and trains, and of its critic."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.config import Config


def step_problems(config: Config, num_train_prompts: int | None) -> Iterator[str]:
    """Args: num_train_prompts: rows left in the training data, None if unknown."""
    batch, mini = config.trainer.train_batch_size, config.trainer.policy_mini_batch_size
    if batch % mini:
        near = max(divisor for divisor in range(1, min(batch, mini) + 1) if batch % divisor == 0)
        yield (
            f"trainer.train_batch_size is {batch}: not a multiple of trainer.policy_mini_batch_size {mini}. Set "
            f"policy_mini_batch_size to a divisor such as {near}"
        )
    if num_train_prompts is not None and batch > num_train_prompts:
        yield (
            f"trainer.train_batch_size is {batch}: more than the {num_train_prompts} prompts of data.train_data. Set "
            f"it to at most {num_train_prompts} (prompts dropped for trainer.max_prompt_length are not counted)"
        )
    trainer = config.trainer
    started = trainer.over_sampling_batch_size
    if started is None:
        return
    given = f"trainer.over_sampling_batch_size is {started}"
    if trainer.source != "on_policy":
        yield (
            f"{given}: trainer.source is {trainer.source}, and oversampling needs on_policy (streaming does not "
            "wait for slow groups anyway). Set over_sampling_batch_size=null"
        )
    if trainer.algorithm.dynamic_sampling.type == "replace":
        yield (
            f"{given} and trainer.algorithm.dynamic_sampling.type is replace: oversampling samples other prompts "
            "instead of copying groups. Set dynamic_sampling.type=filter or null"
        )
    if started <= trainer.train_batch_size:
        yield (
            f"{given}: not more than trainer.train_batch_size {trainer.train_batch_size}, the prompts of a step. Set "
            "it to about 1.25 times that, or to null"
        )
    if num_train_prompts is not None and started > num_train_prompts:
        yield (
            f"{given}: more than the {num_train_prompts} prompts of data.train_data, so prompts would be sampled twice "
            f"at a time. Set it to at most {num_train_prompts}"
        )


def critic_problems(config: Config) -> Iterator[str]:
    """A critic that would not be used, and mini-batches that do not fit."""
    trainer = config.trainer
    estimator, path = trainer.algorithm.advantage_estimator, trainer.critic.model.path
    batch, mini = trainer.train_batch_size, trainer.critic_mini_batch_size
    if not trainer.algorithm.needs_critic:
        if path != trainer.policy.model.path:
            yield (
                f"trainer.critic.model.path is {path} and trainer.algorithm.advantage_estimator is {estimator}, which "
                "uses no critic. Set advantage_estimator=gae, or remove the path"
            )
        return
    if trainer.placement.release == "exit" and trainer.algorithm.use_kl_in_reward:
        yield (
            "trainer.placement.release is exit and trainer.algorithm.use_kl_in_reward is true: with a critic, logprobs "
            "and values wait for each other in processes that would end. Set release=offload, or use_kl_loss"
        )
    if batch % mini:
        yield (
            f"trainer.train_batch_size is {batch}: not a multiple of trainer.critic_mini_batch_size {mini}. Set "
            "critic_mini_batch_size to a divisor"
        )
