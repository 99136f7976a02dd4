"""Checks of the keys for stale samples."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.algorithms.build import build_objective
from skyrl_train.config import Config


def staleness_problems(config: Config) -> Iterator[str]:
    """Problems of keys that contradict each other or would have no effect."""
    trainer = config.trainer
    if trainer.source == "on_policy":
        for key in ("max_staleness", "pipeline_depth"):
            if getattr(trainer, key):
                yield (
                    f"trainer.{key} is {getattr(trainer, key)}: with trainer.source=on_policy no sample is stale. Set "
                    "trainer.source=streaming or remove the key"
                )
    elif trainer.source == "streaming" and trainer.depth > trainer.staleness:
        yield (
            f"trainer.pipeline_depth is {trainer.depth}: more batches ahead than trainer.max_staleness "
            f"{trainer.staleness} allows to be trained in time. Lower it or raise max_staleness"
        )
    if trainer.eval_beside_training and trainer.source != "streaming":
        yield (
            f"trainer.eval_beside_training is true and trainer.source is {trainer.source}: only with streaming can "
            "training continue during an evaluation. Set trainer.source=streaming or remove the key"
        )
    algorithm = trainer.algorithm
    has_kl = (algorithm.use_kl_loss and algorithm.kl_loss_coef) or algorithm.distillation.distillation_type == "loss"
    if algorithm.use_corrected_kl and not (has_kl and algorithm.corrections):
        missing = "correction" if has_kl else "such term"
        yield (
            "trainer.algorithm.use_corrected_kl is true: it multiplies the KL term of the loss and that of "
            f"distillation_type=loss by the corrections, and there is no {missing}. Set it to false"
        )
    if trainer.algorithm.prox_logp_method == "loglinear":
        yield from (
            f"trainer.algorithm.prox_logp_method is loglinear {reason}. Set it to recompute"
            for reason in _reasons_to_recompute(config)
        )


def _reasons_to_recompute(config: Config) -> Iterator[str]:
    trainer, algorithm = config.trainer, config.trainer.algorithm
    if trainer.source == "on_policy" or (trainer.source == "streaming" and not trainer.staleness):
        yield "and no sample is stale: the engine's logprobs would replace the trainer's"
    if trainer.policy.model.lora.rank > 0 and trainer.policy.model.lora.dropout > 0:
        yield "and trainer.policy.model.lora.dropout is above 0: the interpolated logprobs would contain dropout noise"
    if algorithm.use_kl_in_reward and algorithm.kl_loss_coef:
        yield "and use_kl_in_reward is true: the penalty needs the forward pass that loglinear saves"
    try:
        selections = build_objective(algorithm.values, 1.0, 1).selections
    except ValueError:
        return  # checks/rl.py says why
    if selections:
        yield f"and {selections[0].name} selects tokens by values that only a forward pass gives"
