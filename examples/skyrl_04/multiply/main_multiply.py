r"""An environment registered in the program, in the form of skyrl_train 0.4. The first command writes the rows.

python multiply_dataset.py multiply.jsonl
python main_multiply.py +experiment=quickstart 'data.train_data=[multiply.jsonl]' 'data.val_data=[]' \
    environment.env_class=multiply +environment.skyrl_gym.multiply.format_reward=0.5
"""

import hydra
import ray
from omegaconf import DictConfig
from skyrl_gym.envs import register
from skyrl_train.utils import initialize_ray

from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig) -> None:
    register(id="multiply", entry_point="env:MultiplyEnv")
    exp = BasePPOExp(cfg)
    exp.run()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
