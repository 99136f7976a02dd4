"""Checks of corrections between engine and trainer, and of the keys for stale samples."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from skyrl_train.algorithms.build import build_objective, uses_rollout_logprobs
from skyrl_train.config import Config
from skyrl_train.config.algorithm import AlgorithmConfig
from skyrl_train.config.compose import RELATIVE_TO_ENGINE
from skyrl_train.config.rl import TrainerConfig
from skyrl_train.weight_sync.channels.table import STOCK

IMPORTANCE_WEIGHTS = ("token_tis", "sequence_tis", "icepop")
"""Corrections that multiply by the ratio to the engine's policy; the others are masks."""
SMALL_LOG_WEIGHT = 0.01
"""Log-ratio of engine and trainer that changes weights and is within the bounds of masks."""
OUTSIDE_CACHES = {"kv_offloading_size", "kv_transfer_config"}
"""vLLM's arguments that store KV caches in other places."""
OF_POLICY = ("opsm", "top_entropy")
"""Masks that do not compare with the engine."""


def correction_problems(trainer: TrainerConfig) -> Iterator[str]:
    """Weights that count twice, bounds that no token lies between, and a mask that never masks."""
    algorithm, key = trainer.algorithm, "trainer.algorithm.corrections"
    weights = [name for name in algorithm.corrections if name in IMPORTANCE_WEIGHTS]
    if algorithm.policy_loss_type in RELATIVE_TO_ENGINE and weights:
        yield (
            f"{key} has {', '.join(weights)}: the ratio of {algorithm.policy_loss_type} is "
            "already to the engine's policy, so the difference would count twice. Remove it (masks may stay)"
        )
    elif len(weights) > 1:
        yield (
            f"{key} has {', '.join(weights)}: each weighs by the ratio to the engine's policy, so the difference would "
            "count twice. Keep one of them (masks may stay)"
        )
    for section in ("off_policy_correction", "clip_cov"):
        bounds = algorithm.values[section]
        for low, high in ((name, name.replace("_low", "_high").replace("_lb", "_ub")) for name in bounds):
            if bounds[low] > bounds[high]:
                yield (
                    f"trainer.algorithm.{section}.{low} is {bounds[low]:g}: above {high} {bounds[high]:g}, so nothing "
                    "lies between. Swap them"
                )
    makes_one_step = trainer.update_epochs_per_batch == 1 and trainer.train_batch_size <= trainer.policy_mini_batch_size
    has_dropout = trainer.policy.model.lora.rank > 0 and trainer.policy.model.lora.dropout > 0
    if "opsm" in algorithm.corrections and makes_one_step and not has_dropout:
        yield (
            f"{key} has opsm: it masks samples that became less likely in earlier optimizer steps of an update, and "
            "each update makes one step. Lower trainer.policy_mini_batch_size, or use geometric_mask"
        )


def double_weight_warning(algorithm: AlgorithmConfig) -> str | None:
    """Return a warning if a loss of the user multiplies by the ratio to the engine like a correction beside it."""
    weights = [name for name in algorithm.corrections if name in IMPORTANCE_WEIGHTS]
    loss_alone = replace(build_objective(algorithm.values, 1.0), corrections=())
    if not weights or not uses_rollout_logprobs(loss_alone, SMALL_LOG_WEIGHT):
        return None
    return (
        f"trainer.algorithm.corrections has {', '.join(weights)}, and {algorithm.policy_loss_type} reads "
        "rollout_logprobs: if its ratio is to the engine's policy, the difference counts twice. Set "
        "trainer.algorithm.corrections=[], unless this is intended"
    )


def treatment_of_quantization(config: Config) -> str | None:
    """How the objective treats samples of quantised engines, and why; None if engines are not quantised, or if the
    objective ignores the difference.
    """
    algorithm, quantization = config.trainer.algorithm, config.generator.quantization
    if quantization is None or not uses_rollout_logprobs(build_objective(algorithm.values, 1.0)):
        return None
    used = [name for name in algorithm.corrections if name not in OF_POLICY]
    if algorithm.policy_loss_type in RELATIVE_TO_ENGINE or not used:
        used.insert(0, f"policy_loss_type={algorithm.policy_loss_type}")
    corrected = ", ".join(used)
    return f"{quantization}, corrected by {corrected}, because they sample from another distribution than the trainer's"


def quantization_warning(config: Config) -> str | None:
    """Return a warning if samples of quantised engines are trained without a correction, else None."""
    quantization = config.generator.quantization
    if quantization is None or treatment_of_quantization(config) is not None:
        return None
    return (
        f"trainer.algorithm.corrections is {list(config.trainer.algorithm.corrections)} and generator.quantization is "
        f"{quantization}: samples are from another distribution than the trainer's, which biases gradients. "
        "Remove the key (the default is [token_tis]), unless this is intended"
    )


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


def kv_cache_problems(config: Config) -> Iterator[str]:
    """Keys with which no response could continue from the KV cache that it has."""
    generator = config.generator
    if generator.recompute_kv_cache:
        return
    key = "generator.recompute_kv_cache is false"
    if generator.pause_mode != "keep":
        yield (
            f"{key} and generator.pause_mode is {generator.pause_mode}: no running response keeps its KV cache then. "
            "Set pause_mode=keep or recompute_kv_cache=true"
        )
    if config.trainer.placement.takes_turns:
        yield (
            f"{key} and trainer.placement.colocate_all is true: engines release their KV cache before each update. "
            "Set recompute_kv_cache=true, colocate_all=false, or release=none if all fit on the devices"
        )
    if not generator.run_engines_locally:
        yield (
            f"{key} and generator.run_engines_locally is false: a running server decides this itself. Set "
            "recompute_kv_cache=true, or run_engines_locally=true"
        )
    for name in OUTSIDE_CACHES & generator.engine_init_kwargs.keys():
        yield (
            f"{key} and generator.engine_init_kwargs has {name}: a cache outside the engine would hold keys and values "
            f"of older weights. Set recompute_kv_cache=true or remove {name}"
        )


def eval_engine_problems(config: Config) -> Iterator[str]:
    """Reserved engines that no evaluation would use, that cannot exist, or that would leave none for training."""
    trainer, generator = config.trainer, config.generator
    if not generator.eval_num_engines:
        return
    key = f"generator.eval_num_engines is {generator.eval_num_engines}"
    if generator.num_rollout_engines < 1:
        kind = "num_inference_engines" if generator.run_engines_locally else "remote_inference_engine_urls"
        yield (
            f"{key}: training needs at least one of the {generator.num_engines} engine(s) of generator.{kind}. Lower "
            f"eval_num_engines or add engines"
        )
    if trainer.placement.colocate_all:
        yield (
            f"{key} and trainer.placement.colocate_all is true: engines on the trainer's devices stop while it trains. "
            "Set eval_num_engines=0 or colocate_all=false"
        )
    if not (trainer.evaluates_beside and trainer.eval_interval > 0):
        yield (
            f"{key}: the reserved engines serve evaluations beside training, and this run has none. Set "
            "it to 0, or set trainer.eval_interval, trainer.source=streaming and trainer.eval_beside_training=true"
        )
    if generator.weight_sync_backend == STOCK:
        yield (
            f"{key} and generator.weight_sync_backend is {STOCK}: what stock vLLM servers have received is only "
            "checked on samples of training. Set eval_num_engines=0 or use another transport"
        )


def _reasons_to_recompute(config: Config) -> Iterator[str]:
    trainer, algorithm = config.trainer, config.trainer.algorithm
    if trainer.source == "on_policy" or not trainer.staleness:
        yield "and no sample is stale: the engine's logprobs would replace the trainer's"
    if trainer.policy.model.lora.rank > 0 and trainer.policy.model.lora.dropout > 0:
        yield "and trainer.policy.model.lora.dropout is above 0: the interpolated logprobs would contain dropout noise"
    if algorithm.use_kl_in_reward and algorithm.kl_loss_coef:
        yield "and use_kl_in_reward is true: the penalty needs the forward pass that loglinear saves"
    try:
        selections = build_objective(algorithm.values, 1.0).selections
    except ValueError:
        return  # checks/rl.py says why
    if selections:
        yield f"and {selections[0].name} selects tokens by values that only a forward pass gives"
