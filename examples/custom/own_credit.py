"""An advantage estimator of your own; docs/extending.md explains it."""

import torch

from skyrl_train.algorithms.credit import CreditInputs


def discounted_returns(inputs: CreditInputs, *, discount: float) -> torch.Tensor:
    """Discounted rewards from each token on, minus their mean over all trained tokens."""
    returns = []
    for rewards in torch.split(inputs.rewards, inputs.cu_seqlens.diff().tolist()):
        distance = torch.arange(len(rewards))
        weights = (discount ** (distance[None] - distance[:, None]).clamp(min=0).double()).triu()
        returns.append(weights @ rewards)
    of_tokens = torch.cat(returns)
    return of_tokens - of_tokens[inputs.loss_mask].mean()
