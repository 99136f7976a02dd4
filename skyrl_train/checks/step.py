"""Checks of how many prompts a step samples and trains, and of its critic; and uses of losses that are unusual."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.config import Config
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.rl import TrainerConfig

LARGE_FOR_GSPO = 0.1
"""Bounds made for the ratio of a token."""


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
    if batch % mini:
        yield (
            f"trainer.train_batch_size is {batch}: not a multiple of trainer.critic_mini_batch_size {mini}. Set "
            "critic_mini_batch_size to a divisor"
        )


def doubt_about_loss(trainer: TrainerConfig) -> str | None:
    """How a loss is used otherwise than in its paper, which can be intended; None if it is not."""
    algorithm, key = trainer.algorithm, "trainer.algorithm"
    loss, num_updates = algorithm.policy_loss_type, trainer.versions_per_step
    if loss == "reinforce" and num_updates > 1:
        return (
            f"{key}.policy_loss_type is reinforce and each step has {num_updates} optimizer steps: it has no ratio, so "
            "the later ones are not corrected for the earlier ones. Set trainer.policy_mini_batch_size to "
            f"{trainer.train_batch_size} and trainer.update_epochs_per_batch to 1, or policy_loss_type to regular, "
            "unless this is intended"
        )
    if loss in ("gspo", "gmpo") and algorithm.loss_reduction != "sequence_mean":
        return (
            f"{key}.loss_reduction is {algorithm.loss_reduction}: {loss} has one ratio per sample, and in its paper "
            "every sample counts the same. Set it to sequence_mean, unless this is intended"
        )
    if loss == "gspo" and algorithm.eps_clip_high >= LARGE_FOR_GSPO:
        return (
            f"{key}.eps_clip_high is {algorithm.eps_clip_high:g}: the ratio of gspo is a mean over the sample, which "
            "such a bound hardly ever clips. The paper has eps_clip_low 3e-4 and eps_clip_high 4e-4"
        )
    return None


def doubt_about_lengths(config: Config) -> str | None:
    """Warning about conversations of several turns with room for a prompt alone; None if they have more, in tokens."""
    generator, longest = config.generator, config.trainer.max_prompt_length
    if generator.max_turns == 1 or generator.max_input_length > longest:
        return None
    return (
        f"generator.max_turns is {generator.max_turns} and generator.max_input_length is {longest}, like "
        "trainer.max_prompt_length: a conversation ends without its later turns as soon as prompt, responses and "
        "observations together are longer. Raise max_input_length to what a conversation needs"
    )


def doubt_about_penalty(algorithm: AlgorithmConfig) -> str | None:
    """What a penalty in the reward does to the estimator, which can be intended; None if nothing unusual."""
    estimator, key = algorithm.advantage_estimator, "trainer.algorithm"
    overlong = algorithm.overlong_buffer
    if overlong.len is not None and overlong.penalty_factor and estimator == "maxrl":
        return (
            f"{key}.overlong_buffer.len is {overlong.len}: maxrl divides by the mean reward of a group, which the "
            "penalty can bring near 0 or below, and advantages then grow without bound or change their sign. Set it to "
            "null, or use another advantage_estimator, unless rewards stay positive"
        )
    divides = estimator == "maxrl" or (estimator in ("grpo", "pass@k") and algorithm.grpo_norm_by_std)
    leaves_out = algorithm.zero_variance_filter or algorithm.dynamic_sampling.type is not None
    if not (divides and algorithm.use_kl_in_reward and algorithm.kl_loss_coef) or leaves_out:
        return None
    divisor = "mean" if estimator == "maxrl" else "standard deviation"
    return (
        f"{key}.use_kl_in_reward is true: {estimator} divides the rewards of a group by their {divisor}, so where they "
        "are equal the penalty alone makes advantages of about 1, whatever kl_loss_coef is. Use use_kl_loss instead, "
        "zero_variance_filter=true, or rloo, unless this is intended"
    )
