"""An advantage estimator registered in the program, in the form of skyrl_train 0.4.

python main_custom_advantage.py +experiment=quickstart trainer.algorithm.advantage_estimator=median
"""

from typing import Any

import hydra
import numpy as np
import ray
import torch
from omegaconf import DictConfig
from skyrl_train.utils import initialize_ray
from skyrl_train.utils.ppo_utils import AdvantageEstimatorRegistry
from torch import Tensor

from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg


def median_advantages(
    token_level_rewards: Tensor, response_mask: Tensor, index: np.ndarray, **kwargs: Any
) -> tuple[Tensor, Tensor]:
    """A sample's reward less the median of its group, in which one lucky sample does not count."""
    rewards = token_level_rewards.sum(-1)
    advantages = torch.zeros_like(rewards)
    for uid in np.unique(index):
        group = torch.from_numpy(index == uid)
        advantages[group] = rewards[group] - rewards[group].quantile(0.5)
    per_token = advantages[:, None] * response_mask
    return per_token, per_token


AdvantageEstimatorRegistry.register("median", median_advantages)


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig) -> None:
    exp = BasePPOExp(cfg)
    exp.run()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
