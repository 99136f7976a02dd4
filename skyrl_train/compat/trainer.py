"""skyrl_train 0.4's trainers: their hooks between rollout and batch are served, the others are refused by name."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from skyrl_train.compat.generators.outputs import token_rewards
from skyrl_train.compat.generators.types import GeneratorOutput

_LOOP = "the run has its own loop. Set trainer.source=streaming for asynchronous training, or write a trainer.source"
_BATCH = "register an advantage estimator (skyrl_train.utils.ppo_utils), or name one in trainer.algorithm"
_MODELS = "the run builds, saves and syncs its models. Subclass skyrl_train.Experiment for another part"
REPLACED = {
    **dict.fromkeys(("train", "generate", "eval", "train_critic_and_policy", "fwd_logprobs_values_reward"), _LOOP),
    **dict.fromkeys(("apply_reward_kl_penalty", "compute_advantages_and_returns", "convert_to_training_input"), _BATCH),
    "handle_dynamic_sampling": "set trainer.algorithm.dynamic_sampling.type, or write a trainer.source",
    "pad_batch": "samples are packed without padding, and batches need no padding samples",
    **dict.fromkeys(("_build_train_dataloader_and_compute_training_steps", "_remove_tail_data"), _LOOP),
    "_execute_training_step": _LOOP,
    **dict.fromkeys(
        ("build_models", "init_weight_sync_state", "sync_policy_weights_to_inference_engines", "save_checkpoints"),
        _MODELS,
    ),
    **dict.fromkeys(("load_checkpoints", "save_models", "update_ref_with_policy", "_cleanup_old_checkpoints"), _MODELS),
    "dump_data": "samples.jsonl has samples (trainer.log_samples_interval)",
}
"""Method of 0.4's trainer -> what a subclass uses instead."""
REPLACED_IN_ASYNC = {
    **dict.fromkeys(("_run_training", "_run_generate_for_a_group_loop"), _LOOP),
    "convert_generation_group_mini_batch_to_training_input": _BATCH,
    "async_sync_policy_weights_to_inference_engines": _MODELS,
}
"""The methods that 0.4's asynchronous trainer adds."""


class RayPPOTrainer:
    """Holds what subclasses read, and the hook that they may override: `postprocess_generator_output`."""

    source: str | None = None
    """trainer.source that the trainer asks for."""

    def __init__(
        self,
        cfg: Any,
        tracker: Any,
        tokenizer: Any,
        train_dataset: Any,
        inference_engine_client: Any,
        generator: Any,
        colocate_pg: Any = None,
        eval_dataset: Any = None,
    ) -> None:
        self.cfg, self.tracker, self.tokenizer, self.colocate_pg = cfg, tracker, tokenizer, colocate_pg
        self.train_dataset, self.eval_dataset = train_dataset, eval_dataset
        self.inference_engine_client, self.generator = inference_engine_client, generator
        self.all_metrics: dict[str, Any] = {}
        """Logged with the step in which they are set."""
        self.all_timings: dict[str, Any] = {}
        self.start: Callable[[], None] | None = None
        """Runs the experiment; set by it."""
        self.step_of_run: Callable[[], int] = lambda: 0

    @property
    def global_step(self) -> int:
        """The step that is trained next, from 1."""
        return self.step_of_run() + 1

    def postprocess_generator_output(self, generator_output: GeneratorOutput, uids: list[str]) -> GeneratorOutput:
        """The output of one group with one reward per token. Metrics of rewards are the run's."""
        lengths = map(len, generator_output["response_ids"])
        rewards = [token_rewards(*each) for each in zip(generator_output["rewards"], lengths, strict=True)]
        generator_output["rewards"] = rewards
        return generator_output

    async def train(self) -> None:
        """Run the experiment to its end."""
        assert self.start is not None, "the trainer was not built by BasePPOExp._setup_trainer. Call that"
        self.start()

    def __getattr__(self, name: str) -> Any:
        if name in REPLACED or name in ("dispatch", "policy_model", "train_dataloader"):
            raise NotImplementedError(f"RayPPOTrainer.{name} is not served: {REPLACED.get(name, _MODELS)}")
        raise AttributeError(f"{type(self).__name__} has no {name}")

    @property
    def postprocesses(self) -> bool:
        return overridden(type(self), RayPPOTrainer, "postprocess_generator_output")


class FullyAsyncRayPPOTrainer(RayPPOTrainer):
    """Asynchronous training: the run has trainer.source=streaming."""

    source = "streaming"


def overridden(kind: type, base: type, name: str) -> bool:
    """Whether a subclass has another method of this name."""
    return getattr(kind, name, None) is not getattr(base, name, None)


def refuse(kind: type, base: type, replaced: dict[str, str]) -> None:
    """Raises: NotImplementedError with every overridden hook that is not served, and what replaces it."""
    found = [f"{kind.__name__}.{name}: {text}" for name, text in replaced.items() if overridden(kind, base, name)]
    if found:
        raise NotImplementedError("overridden methods of skyrl_train 0.4 that are not served. " + "; ".join(found))
