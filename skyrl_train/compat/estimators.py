"""Advantage estimators with skyrl_train 0.4's signature as estimators of this project."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skyrl_train.algorithms.credit import CreditInputs
from skyrl_train.compat.losses import accepted, algorithm_config, names
from skyrl_train.compat.padding import Responses


class Estimator:
    """An estimator f(token_level_rewards, response_mask, index, ...) -> (advantages, returns), all [B, R]."""

    reads_max_seq_len = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__, self.__qualname__, self.__module__ = names(function)

    def __call__(self, inputs: CreditInputs, **values: Any) -> Tensor:
        """Advantages [T]; returns, which a critic would learn, are not used. Raises: ValueError for other shapes."""
        responses = Responses.all(inputs.cu_seqlens, inputs.loss_mask | (inputs.rewards != 0))
        response_mask = responses.padded(torch.ones(len(inputs.rewards), dtype=torch.int64))
        named = {
            "token_level_rewards": responses.padded(inputs.rewards.float()),
            "response_mask": response_mask,
            "index": np.array([str(group) for group in inputs.group_ids.tolist()]),
            "values": None,
            **{name: values[name] for name in ("grpo_norm_by_std", "gamma", "lambd")},
            "config": algorithm_config(values),
        }
        result = self.function(**accepted(self.function, named))
        advantages = result[0] if isinstance(result, tuple) and len(result) == 2 else None
        if not isinstance(advantages, Tensor) or advantages.shape != response_mask.shape:
            raise ValueError(
                f"the advantage estimator {self.__name__} returned {result!r:.100}: it must return advantages and "
                f"returns of {tuple(response_mask.shape)}"
            )
        return responses.packed(advantages, len(inputs.rewards))
