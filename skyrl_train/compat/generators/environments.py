"""skyrl_train 0.4's generator that plays environments, over the default rollout."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, OmegaConf

from skyrl_train.compat.generators.client import CURRENT, sampling_params_of
from skyrl_train.compat.generators.functions import get_rollout_metrics
from skyrl_train.compat.generators.outputs import output_of, token_rewards
from skyrl_train.compat.generators.types import (
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    TrajectoryID,
    TrajectoryOutput,
)
from skyrl_train.rollout.collect import all_or_first_error, task_name
from skyrl_train.types import Group


class SkyRLGymGenerator(GeneratorInterface):
    """Plays environments. A subclass may override `agent_loop` or `generate`; otherwise the default rollout runs."""

    def __init__(
        self, generator_cfg: Any, skyrl_gym_cfg: Any, inference_engine_client: Any, tokenizer: Any, model_name: str
    ) -> None:
        self.generator_cfg, self.skyrl_gym_cfg = generator_cfg, _with_env_kwargs(skyrl_gym_cfg)
        self.inference_engine_client, self.tokenizer, self.model_name = inference_engine_client, tokenizer, model_name
        self.max_turns = generator_cfg.max_turns

    async def agent_loop(
        self,
        prompt: list[dict[str, str]],
        env_class: str,
        env_extras: dict[str, Any],
        max_tokens: int,
        max_input_length: int,
        sampling_params: dict[str, Any] | None = None,
        trajectory_id: TrajectoryID | None = None,
    ) -> TrajectoryOutput:
        """One sample by the default rollout, with a reward per token.

        Args: max_tokens, max_input_length: lower limits than those of `sampling_params` and of the run.
        Raises: ValueError if the rollout makes several samples of a conversation.
        """
        call = CURRENT.get()
        session = trajectory_id or TrajectoryID(call.prompt.uid, 0)
        engines, params = call.session(session.to_string())
        row = replace(call.prompt, messages=prompt, env_class=env_class, extras=env_extras)
        params = sampling_params_of(sampling_params, params)
        params = replace(params, max_generate_length=min(max_tokens, params.max_generate_length))
        engines.max_input_length = min(max_input_length, call.engines.max_input_length)
        try:
            made = await call.rollout(row, params, engines)
        finally:  # requests of the session itself have the run's limit
            engines.max_input_length = call.engines.max_input_length
        samples = [made] if not isinstance(made, list) else made
        if len(samples) > 1:
            raise ValueError(
                "the rollout made several samples of a conversation. Set generator.step_wise_trajectories=false, or do "
                "not override agent_loop"
            )
        call.versions += [sample.policy_version for sample in samples if sample.turns]
        output = output_of(Group(row, tuple(samples)))
        return TrajectoryOutput(
            response_ids=output["response_ids"][0],
            reward=token_rewards(output["rewards"][0], len(output["response_ids"][0])),
            stop_reason=samples[0].stop_reason,
            loss_mask=output["loss_masks"][0],
            prompt_ids=output["prompt_token_ids"][0],
            rollout_logprobs=(output["rollout_logprobs"] or [[]])[0],
            env_metrics=samples[0].env_metrics,
        )

    async def generate(self, input_batch: GeneratorInput, disable_tqdm: bool = False) -> GeneratorOutput:
        """The trajectories of `agent_loop`, all at once. Args: disable_tqdm: not used, the run shows the progress."""
        prompts, classes = input_batch["prompts"], input_batch["env_classes"]
        extras = input_batch["env_extras"] or [{} for _ in prompts]
        ids: Sequence[TrajectoryID | None] = input_batch["trajectory_ids"] or [None] * len(prompts)
        params = input_batch["sampling_params"]
        max_tokens = (params or {}).get("max_tokens") or self.generator_cfg.sampling_params.max_generate_length
        limits = max_tokens, self.generator_cfg.max_input_length
        loops = (
            self.agent_loop(prompt, env_class, extra, *limits, sampling_params=params, trajectory_id=trajectory_id)
            for prompt, env_class, extra, trajectory_id in zip(prompts, classes, extras, ids, strict=True)
        )
        name = task_name(CURRENT.get().prompt)
        made = await all_or_first_error([(name, loop) for loop in loops])
        has_lists = any(isinstance(each.reward, list) for each in made)
        rewards: Any = [
            token_rewards(each.reward, len(each.response_ids)) if has_lists else each.reward for each in made
        ]
        logprobs: Any = [each.rollout_logprobs for each in made]
        responses = [each.response_ids for each in made]
        return GeneratorOutput(
            prompt_token_ids=[each.prompt_ids for each in made],
            response_ids=responses,
            rewards=rewards,
            loss_masks=[each.loss_mask for each in made],
            stop_reasons=[each.stop_reason for each in made],
            rollout_metrics=get_rollout_metrics(responses, rewards, [each.env_metrics for each in made], classes),
            rollout_logprobs=None if None in logprobs else logprobs,
        )


def _with_env_kwargs(cfg: Any) -> Any:
    """`environment.skyrl_gym` with the settings of each environment at its name, as in 0.4."""
    if not isinstance(cfg, DictConfig) or "env_kwargs" not in cfg:
        return cfg
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    return OmegaConf.create({**plain["env_kwargs"], **plain})
