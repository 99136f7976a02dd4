"""skyrl_train 0.4's generator of environments: subclasses change its loop, and the default loop is this project's."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from skyrl_train.compat.generators.client import CURRENT, InferenceEngineClient
from skyrl_train.compat.generators.collector import GeneratorCollector
from skyrl_train.compat.generators.environments import SkyRLGymGenerator
from skyrl_train.compat.generators.types import TrajectoryOutput
from skyrl_train.rollout.admission import Admission, Ledger
from skyrl_train.rollout.dialogue import StepWiseDialogue
from skyrl_train.types import Group, SamplingParams
from tests.support.hydra_main import composed
from tests.support.rollouts import Quiet
from tests.support.scripted import PARAMS, Script, prompt, sampler
from tests.support.tiny import tiny_tokenizer

TOKENIZER = tiny_tokenizer()
CONFIG = SimpleNamespace(max_turns=2, max_input_length=100, sampling_params=SimpleNamespace(max_generate_length=8))


def collect(
    kind: type[SkyRLGymGenerator], script: Any, n_samples: int = 2, **options: Any
) -> tuple[list[Group], list[Any], Admission]:
    reported: list[Any] = []
    admission = Admission(0)
    generator = kind(CONFIG, None, InferenceEngineClient(TOKENIZER, "model"), TOKENIZER, "model")
    with sampler(TOKENIZER, script, **options) as playing:
        default = playing.collector
        collector = GeneratorCollector(generator, default._rollout, default.engines, lambda: 0, reported.append)
        training = collector.for_training(lambda: 0, needs_logprobs=True)
        rows = [prompt("guess_number", "guess:", "7")]
        groups = asyncio.run(training.collect(rows, n_samples, PARAMS, Quiet(), admission))
    return groups, reported, admission


class Doubled(SkyRLGymGenerator):
    """The default loop with twice the rewards."""

    async def agent_loop(self, *arguments: Any, **named: Any) -> TrajectoryOutput:
        output = await super().agent_loop(*arguments, **named)
        assert isinstance(output.reward, list) and len(output.reward) == len(output.response_ids)
        output.reward = [2 * reward for reward in output.reward]
        return output


class Own(SkyRLGymGenerator):
    """Asks once, and answers itself with a token that is not trained."""

    async def agent_loop(
        self,
        prompt: list[dict[str, str]],
        env_class: str,
        env_extras: dict[str, Any],
        max_tokens: int,
        max_input_length: int,
        sampling_params: dict[str, Any] | None = None,
        trajectory_id: Any = None,
    ) -> TrajectoryOutput:
        assert (env_class, max_tokens, max_input_length) == ("guess_number", 8, 100)
        read = self.tokenizer.encode(prompt[0]["content"])
        answers = await self.inference_engine_client.generate(
            {"prompt_token_ids": [read], "session_ids": [trajectory_id.to_string()], "sampling_params": sampling_params}
        )
        written, logprobs = answers["response_ids"][0], answers["response_logprobs"][0]
        rewards = [0.5] + [0.0] * len(written)
        return TrajectoryOutput([*written, 1], rewards, "length", [1] * len(written) + [0], read, [*logprobs, 0.0], {})


def test_a_loop_that_calls_the_default_one_plays_environments_with_its_tokens_and_logprobs():
    script = Script(TOKENIZER, "7<eos>")
    (group,), (reported,), admission = collect(Doubled, script)
    with sampler(TOKENIZER, Script(TOKENIZER, "7<eos>")) as playing:
        plain = asyncio.run(playing.sample(prompt("guess_number", "guess:", "7"), PARAMS))
    for each in group.samples:
        assert each.token_ids.tolist() == plain.token_ids.tolist() and each.prompt_length == plain.prompt_length
        assert each.loss_mask.tolist() == plain.loss_mask.tolist()
        assert each.rollout_logprobs.tolist() == plain.rollout_logprobs.tolist()
        assert each.reward == 2 * plain.reward > 0
    assert reported["environment/turns"] == 1.0 and admission.ledger == Ledger(generated=1, waiting=1)
    assert script.route_keys == ["0", "0"]


class Limited(SkyRLGymGenerator):
    """The default loop with other limits than the configuration's."""

    limits: dict[str, int]

    async def agent_loop(self, *arguments: Any, **named: Any) -> TrajectoryOutput:
        prompt, env_class, extras, *_ = arguments
        limits = {"max_tokens": 8, "max_input_length": 100, **self.limits}
        output = await super().agent_loop(prompt, env_class, extras, **limits, **named)
        assert isinstance(output.reward, list), "also where nothing was earned"
        (engines,) = CURRENT.get()._sessions.values()
        assert engines.max_input_length == 1000, "that of the run again"
        return output


@pytest.mark.parametrize(
    ("limits", "asked"), [({"max_tokens": 3}, [3]), ({"max_tokens": 9}, [8]), ({"max_input_length": 2}, [])]
)
def test_the_default_loop_keeps_to_the_limits_that_it_is_given(limits: dict[str, int], asked: list[int]):
    script, lengths = Script(TOKENIZER, "7<eos>"), list[int]()

    async def generate(token_ids: list[int], params: SamplingParams, route_key: str) -> Any:
        lengths.append(params.max_generate_length)
        return await script(token_ids, params, route_key)

    (group,), _, _ = collect(type("Own", (Limited,), {"limits": limits}), generate, n_samples=1)
    assert lengths == asked and [each.stop_reason for each in group.samples] == ["stop" if asked else "length"]


def test_settings_of_environments_are_read_as_in_0_4():
    cfg = composed("+environment.skyrl_gym.multiply.format_reward=0.5").environment.skyrl_gym
    read = SkyRLGymGenerator(CONFIG, cfg, None, TOKENIZER, "model").skyrl_gym_cfg
    assert getattr(read, "multiply", {}) == {"format_reward": 0.5} and getattr(read, "other", {}) == {}
    assert (read.max_env_workers, read.env_kwargs) == (cfg.max_env_workers, cfg.env_kwargs)


def test_a_loop_of_its_own_reaches_the_engines_by_the_client():
    script = Script(TOKENIZER, "12")
    (group,), _, _ = collect(Own, script)
    read, written = TOKENIZER.encode("guess:"), TOKENIZER.encode("12")
    for each in group.samples:
        assert each.token_ids.tolist() == [*read, *written, 1]
        assert each.loss_mask.tolist() == [False] * len(read) + [True, True, False]
        assert each.rewards.tolist() == [0.0] * len(read) + [0.5, 0.0, 0.0] and each.stop_reason == "length"
        assert each.rollout_logprobs.tolist() == [0.0] * len(read) + [-0.5, -1.5, 0.0]
    assert script.route_keys == ["0_0", "0_1"]


def test_step_wise_conversations_are_refused_in_a_loop_of_its_own():
    script = Script(TOKENIZER, "1<eos>", "7<eos>")
    with pytest.raises(ValueError, match="several samples of a conversation. Set generator.step_wise_trajectories=fal"):
        collect(Doubled, script, dialogue=StepWiseDialogue)
