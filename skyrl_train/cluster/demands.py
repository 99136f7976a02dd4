"""Which processes a configuration asks for, and the models that they load."""

from __future__ import annotations

from skyrl_train.cluster.downloads import Load, policy_load
from skyrl_train.cluster.placement import Demand, Placement
from skyrl_train.config import Config
from skyrl_train.config.policy import ScoringModel

POLICY, ENGINES = "policy ranks", "engines"
"""Names of demands, like the results of `engines_of` (a teacher's) and `ranks_of`."""


def engines_of(model: ScoringModel) -> str:
    return f"engines of the {model.name}"


def ranks_of(model: ScoringModel) -> str:
    return f"{model.name} ranks"


def demands(config: Config) -> list[Demand]:
    """All processes of a run of reinforcement learning, those of the policy first."""
    trainer, generator = config.trainer, config.generator
    found = [Demand(POLICY, trainer.placement.num_policy_ranks, 1)]
    found += [Demand(ranks_of(model), model.num_ranks, 1) for model in trainer.scoring_models]
    count, width = trainer.teacher.num_inference_engines, trainer.teacher.inference_engine_tensor_parallel_size
    found += [Demand(engines_of(model), count, width) for model in trainer.engine_teachers]
    width = generator.inference_engine_tensor_parallel_size if generator.run_engines_locally else 0
    return [*found, Demand(ENGINES, generator.num_engines, width)]


def loads(config: Config, placement: Placement) -> list[Load]:
    """The models of these processes, with the slots in which each is loaded."""
    trainer, slots = config.trainer, placement.slots
    found = [policy_load(trainer, *slots[POLICY], *slots[ENGINES])]
    found += [Load(model.path_key, model.model_path, slots[ranks_of(model)]) for model in trainer.scoring_models]
    teachers = trainer.engine_teachers
    return [*found, *(Load(model.path_key, model.model_path, slots[engines_of(model)]) for model in teachers)]
