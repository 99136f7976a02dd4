"""A policy of a trial on one rank, and copies of all that it keeps between steps."""

from __future__ import annotations

from dataclasses import replace

import torch

from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.verify.layout_check import OPTIMIZER, Layout, Trial, share_of
from skyrl_train.ranks import Rendezvous
from skyrl_train.types import TrainBatch
from tests.support.families import without_kl

ADAM = replace(OPTIMIZER, lr=1e-2)


def build(rendezvous: Rendezvous, trial: Trial, one: Layout, *, bf16: bool) -> tuple[MegatronPolicy, TrainBatch]:
    objective = without_kl(trial.objective)
    policy = MegatronPolicy(
        rendezvous,
        trial.model_path,
        one.megatron,
        ADAM,
        objective,
        bf16=bf16,
        seed=1,
        num_optimizer_steps=4,
        lora=trial.lora,
    )
    batch = share_of(trial, one, policy.ranks, num_mini_batches=2)
    return policy, batch


def everything(policy: MegatronPolicy) -> dict[str, torch.Tensor]:
    """Copies of all that a rank keeps between steps."""
    found = {}
    for index, module in enumerate(policy.model.modules):
        named = [*module.named_parameters(), *module.named_buffers()]
        found |= {f"{index}.{name}": tensor.detach().clone() for name, tensor in named}
    for index, part in enumerate(policy._optimizer.chained_optimizers):
        for number, parameter in enumerate(p for group in part.optimizer.param_groups for p in group["params"]):
            found[f"main.{index}.{number}"] = parameter.detach().clone()
            state = part.optimizer.state[parameter]
            found |= {f"{name}.{index}.{number}": state[name].clone() for name in ("exp_avg", "exp_avg_sq")}
    return found
