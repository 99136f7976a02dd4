"""Asynchronous training in the form of skyrl_train 0.4.

python main_async.py +experiment=quickstart trainer.fully_async.max_staleness_steps=2
"""

import asyncio
from typing import Any

import hydra
import ray
from omegaconf import DictConfig
from skyrl_train.fully_async_trainer import FullyAsyncRayPPOTrainer
from skyrl_train.utils import initialize_ray

from skyrl_train.entrypoints.main_base import BasePPOExp, config_dir, validate_cfg


class AsyncExp(BasePPOExp):
    def get_trainer(self, *args: Any, **kwargs: Any) -> FullyAsyncRayPPOTrainer:
        return FullyAsyncRayPPOTrainer(*args, **kwargs)

    def run(self) -> None:
        trainer = self._setup_trainer()
        asyncio.run(trainer.train())


@ray.remote(num_cpus=1)
def skyrl_entrypoint(cfg: DictConfig) -> None:
    exp = AsyncExp(cfg)
    exp.run()


@hydra.main(config_path=config_dir, config_name="ppo_base_config", version_base=None)
def main(cfg: DictConfig) -> None:
    validate_cfg(cfg)
    initialize_ray(cfg)
    ray.get(skyrl_entrypoint.remote(cfg))


if __name__ == "__main__":
    main()
