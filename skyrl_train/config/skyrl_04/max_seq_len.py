"""The parameter `max_seq_len` of 0.4, which follows from the longest conversation, for functions of a user."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, TypeVar

from skyrl_train.algorithms.tables import reads_max_seq_len

NAME = "max_seq_len"
C = TypeVar("C", bound=Any)
"""A configuration of reinforcement learning."""


def with_max_seq_len(config: C) -> C:
    """The configuration with the parameter, if a function of the user reads it and it is not given."""
    algorithm, generator = config.trainer.algorithm, config.generator
    if not reads_max_seq_len(algorithm.policy_loss_type, algorithm.advantage_estimator):
        return config
    longest = generator.max_input_length + generator.sampling_params.max_generate_length
    return _with_parameters(config, {NAME: longest, **algorithm.parameters})


def without_max_seq_len(config: C) -> C:
    """The configuration without the parameter, if `with_max_seq_len` gives it the same value again."""
    rest = {name: value for name, value in config.trainer.algorithm.parameters.items() if name != NAME}
    bare = _with_parameters(config, rest)
    return bare if with_max_seq_len(bare) == config else config


def _with_parameters(config: C, parameters: dict[str, Any]) -> C:
    algorithm = replace(config.trainer.algorithm, parameters=parameters)
    return replace(config, trainer=replace(config.trainer, algorithm=algorithm))
