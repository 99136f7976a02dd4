r"""A model as the judge of responses, in the form of skyrl_train 0.4. The judge's key is in OPENAI_API_KEY.

python main_llm_as_a_judge.py +experiment=quickstart environment.env_class=llm_as_a_judge data.columns.env_class=null \
    +environment.skyrl_gym.llm_as_a_judge.base_url=http://127.0.0.1:8000/v1 \
    +environment.skyrl_gym.llm_as_a_judge.model=judge
"""

import hydra
import ray
from omegaconf import DictConfig
from skyrl_gym.envs import register
from skyrl_train.utils import initialize_ray

from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig) -> None:
    # Environments are made in this task.
    register(id="llm_as_a_judge", entry_point="judge_env:JudgeEnv")
    exp = BasePPOExp(cfg)
    exp.run()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
