"""A generator returned by an experiment, in the form of skyrl_train 0.4.

python main_custom_generator.py +experiment=quickstart generator.max_input_length=48 +second_chance.digit_reward=0.1
"""

import hydra
import ray
from omegaconf import DictConfig
from second_chance import SecondChance
from skyrl_train.utils import initialize_ray

from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg


class SecondChanceExp(BasePPOExp):
    def get_generator(self, cfg, tokenizer, inference_engine_client):
        return SecondChance(cfg.second_chance.digit_reward, inference_engine_client, tokenizer)


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig) -> None:
    exp = SecondChanceExp(cfg)
    exp.run()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
