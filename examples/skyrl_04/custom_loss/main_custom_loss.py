r"""A policy loss registered in the program, in the form of skyrl_train 0.4.

python main_custom_loss.py +experiment=quickstart trainer.algorithm.policy_loss_type=squared_drift \
    +trainer.algorithm.drift_coef=0.1
"""

from typing import Any

import hydra
import ray
from omegaconf import DictConfig
from skyrl_train.utils import initialize_ray
from skyrl_train.utils.ppo_utils import reduce_loss, register_policy_loss
from torch import Tensor

from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg


@register_policy_loss("squared_drift")
def squared_drift(
    log_probs: Tensor,
    old_log_probs: Tensor,
    advantages: Tensor,
    config: DictConfig,
    loss_mask: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """A policy gradient without clipping; the squared change of each log-probability holds the policy back."""
    drift = log_probs - old_log_probs
    terms = config.drift_coef * drift**2 - log_probs * advantages
    loss = reduce_loss(terms, loss_mask, config.loss_reduction, config.max_seq_len)
    return loss, {"largest_drift": drift.abs().max().item()}


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
