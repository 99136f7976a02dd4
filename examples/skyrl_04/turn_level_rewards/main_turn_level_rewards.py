r"""Rewards of turns, and a trainer that changes them, in the form of skyrl_train 0.4.

python main_turn_level_rewards.py +experiment=quickstart environment.env_class=second_try data.columns.env_class=null \
    generator.max_turns=2 generator.max_input_length=64 trainer.algorithm.advantage_estimator=reinforce++ \
    +later_turns=0.5
"""

from typing import Any

import hydra
import ray
from omegaconf import DictConfig
from skyrl_gym.envs import register
from skyrl_train.generators.base import GeneratorOutput
from skyrl_train.utils import initialize_ray

from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg
from skyrl_train.trainer import RayPPOTrainer


class DiscountedTurnsTrainer(RayPPOTrainer):
    """Each turn counts `later_turns` times the one before it."""

    def postprocess_generator_output(self, generator_output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        output = super().postprocess_generator_output(generator_output, uids)
        for rewards, mask in zip(output["rewards"], output["loss_masks"], strict=True):
            turn = 0
            for token, is_trained in enumerate(mask):
                rewards[token] *= self.cfg.later_turns**turn
                turn += is_trained and token + 1 < len(mask) and not mask[token + 1]
        self.all_metrics["reward/later_turns"] = self.cfg.later_turns
        return output


class TurnsExp(BasePPOExp):
    def get_trainer(self, *args: Any, **kwargs: Any) -> RayPPOTrainer:
        return DiscountedTurnsTrainer(*args, **kwargs)


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig) -> None:
    register(id="second_try", entry_point="env:SecondTryEnv")
    exp = TurnsExp(cfg)
    exp.run()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
