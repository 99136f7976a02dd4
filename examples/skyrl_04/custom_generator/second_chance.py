"""A generator in the form of skyrl_train 0.4: a wrong answer is refused once, and the model answers again."""

import asyncio
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.generators.base import GeneratorInput, GeneratorInterface, GeneratorOutput
from skyrl_train.generators.utils import get_rollout_metrics
from skyrl_train.inference_engines.base import InferenceEngineInput
from skyrl_train.inference_engines.inference_engine_client import InferenceEngineClient

REFUSAL = " no. again: "


@dataclass
class Trajectory:
    """Tokens of a conversation after its prompt, each with its mask, logprob and reward."""

    prompt_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    stop_reason: str = "stop"
    attempts: int = 0

    def add(self, token_ids: list[int], logprobs: list[float] | None = None, reward: float = 0.0) -> None:
        """Tokens of the model, the last of which earns the reward, or without logprobs those that it reads."""
        self.response_ids += token_ids
        self.loss_mask += [int(logprobs is not None)] * len(token_ids)
        self.logprobs += logprobs or [0.0] * len(token_ids)
        self.rewards += [0.0] * (len(token_ids) - 1) + [reward]


class SecondChance(GeneratorInterface):
    """A right first answer earns 1, a right second one 0.5, and each digit of a wrong one up to `digit_reward`."""

    def __init__(self, digit_reward: float, client: InferenceEngineClient, tokenizer: Any) -> None:
        self.digit_reward, self.client, self.tokenizer = digit_reward, client, tokenizer

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        rows = zip(input_batch["prompts"], input_batch["env_extras"], input_batch["trajectory_ids"], strict=True)
        params = input_batch["sampling_params"]
        made = await asyncio.gather(
            *(
                self.trajectory(messages, extras["reward_spec"]["ground_truth"], params, trajectory_id.to_string())
                for messages, extras, trajectory_id in rows
            )
        )
        responses, rewards = [each.response_ids for each in made], [each.rewards for each in made]
        metrics = get_rollout_metrics(responses, rewards)
        metrics["second_chance/avg_attempts"] = sum(each.attempts for each in made) / len(made)
        return GeneratorOutput(
            prompt_token_ids=[each.prompt_ids for each in made],
            response_ids=responses,
            rewards=rewards,
            loss_masks=[each.loss_mask for each in made],
            stop_reasons=[each.stop_reason for each in made],
            rollout_metrics=metrics,
            rollout_logprobs=[each.logprobs for each in made],
        )

    async def trajectory(
        self, messages: list[dict[str, str]], answer: str, sampling_params: dict[str, Any], session_id: str
    ) -> Trajectory:
        # transformers 5 returns token ids alone only if asked to.
        prompt_ids = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        made = Trajectory(prompt_ids)
        for share in (1.0, 0.5):
            output = await self.client.generate(
                InferenceEngineInput(
                    prompt_token_ids=[prompt_ids + made.response_ids],
                    session_ids=[session_id],
                    sampling_params=sampling_params,
                )
            )
            text, made.stop_reason = output["responses"][0].strip(), output["stop_reasons"][0]
            made.attempts += 1
            is_right = text == answer
            digits = sum(map(str.isdigit, text)) / max(1, len(text))
            reward = share if is_right else self.digit_reward * digits
            made.add(output["response_ids"][0], output["response_logprobs"][0], reward)
            if is_right:
                break
            if made.attempts == 1:
                made.add(self.tokenizer.encode(REFUSAL, add_special_tokens=False))
        return made
