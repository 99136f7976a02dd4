"""Sampling parameters of training samples: what the engine samples from must be what the trainer computes."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.config.generator import SamplingConfig

NEUTRAL = {"top_p": 1.0, "top_k": -1, "min_p": 0.0}
"""Values with which the engine samples from all tokens."""


def training_sampling_problems(sampling: SamplingConfig) -> Iterator[str]:
    """Parameters that cut tokens off the engine's distribution; evaluation may have them."""
    key = "generator.sampling_params"
    if sampling.temperature == 0:
        yield (
            f"{key}.temperature is 0: training learns from differing samples, set it above 0 "
            "(evaluation has eval_sampling_params)"
        )
    for name, neutral in NEUTRAL.items():
        value = getattr(sampling, name)
        if value != neutral:
            yield (
                f"{key}.{name} is {value}: the engine would sample from a part of the tokens, and the trainer computes "
                f"logprobs over all of them, so every gradient would be wrong. Set it to {neutral} (evaluation may "
                f"truncate: generator.eval_sampling_params.{name})"
            )
