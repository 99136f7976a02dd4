"""The default rollout: one environment and the engines -> one conversation."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from omegaconf import DictConfig, OmegaConf

from skyrl_train.config import Config
from skyrl_train.config.compose import DEFAULT_ENV_CLASS
from skyrl_train.data.chat import ChatTemplate
from skyrl_train.envs.registry import check_creator, env_creator, is_known, row_problem, unknown
from skyrl_train.rollout.contract import Engines
from skyrl_train.rollout.dialogue import ChatDialogue
from skyrl_train.rollout.env_pool import CallTimeout, EnvPool
from skyrl_train.rollout.episode import Episode
from skyrl_train.types import Generation, Prompt, Sample, SamplingParams

_T = TypeVar("_T")


class Sampler:
    """Plays episodes of skyrl-gym environments."""

    def __init__(
        self,
        env_pool: EnvPool,
        env_kwargs: Mapping[str, Mapping[str, Any]],
        extra: Mapping[str, Any] | None,
        dialogue: Callable[[ChatTemplate], ChatDialogue],
    ) -> None:
        """Args:
        env_kwargs: env_class -> its `env_config`; empty for other classes.
        extra: the user's own values, as `env_config.extra` of every environment.
        dialogue: form of the conversations.
        """
        self._env_pool, self._dialogue = env_pool, dialogue
        self._env_configs = {name: env_config(kwargs, extra) for name, kwargs in env_kwargs.items()}
        self._empty_env_config = env_config({}, extra)

    async def sample(self, prompt: Prompt, sampling_params: SamplingParams, engines: Engines) -> list[Sample]:
        """Play one episode: until the environment is done, `max_turns` generations, or a conversation longer than
        `max_input_length` (stop_reason "length"; a prompt that is too long gives a sample without generation, of
        its first `max_input_length` tokens, reward 0 and version 0). Observations after the last generation are not
        part of a sample.

        Raises: EnvironmentFailure; errors of `engines.generate`. The environment is closed once no call of it runs.
        """
        env_config = self._env_configs.get(prompt.env_class, self._empty_env_config)
        episode = Episode(prompt, env_config=env_config, max_turns=engines.max_turns)
        try:
            return await self._play(prompt, episode, sampling_params, engines)
        except BaseException:
            self._env_pool.submit(episode.abandon)
            raise

    async def _play(
        self, prompt: Prompt, episode: Episode, sampling_params: SamplingParams, engines: Engines
    ) -> list[Sample]:
        # Messages are tokenised, and samples are built, on the environment's thread, not on the event loop.
        dialogue = self._dialogue(engines.chat)

        def begin() -> None:
            _render(episode, partial(dialogue.begin, episode.start()))

        def answer(generation: Generation) -> list[Sample] | None:
            """Let the environment answer. Returns: the samples if it was the last turn."""
            dialogue.write(generation)
            last = dialogue.turns == engines.max_turns
            turn = episode.step(generation.text, last=last, token_ids=generation.token_ids)
            dialogue.add_reward(turn.reward, turn.named_rewards)
            if turn.done or last:
                return dialogue.samples(episode.metrics)
            _render(episode, partial(dialogue.answer, turn.observations))
            return None

        await self._on_env_thread(engines, episode, begin)
        while True:
            input_ids = dialogue.input_ids()
            if len(input_ids) > engines.max_input_length:
                dialogue.cut(engines.max_input_length)
                await self._on_env_thread(engines, episode, episode.finish)
                return dialogue.samples(episode.metrics)
            generation = await engines.generate(input_ids, sampling_params, prompt.uid)
            if (samples := await self._on_env_thread(engines, episode, partial(answer, generation))) is not None:
                return samples

    async def _on_env_thread(self, engines: Engines, episode: Episode, function: Callable[[], _T]) -> _T:
        try:
            return await self._env_pool.submit(function)
        except CallTimeout as error:
            raise episode.failure(f"{error} (environment.step_timeout_s)") from error
        finally:
            engines.requests.note_progress()  # where calls queue for a thread, it takes long until a rollout ends


def _render(episode: Episode, read: Callable[[], None]) -> None:
    episode.call = "the chat template"
    try:
        read()
    except ValueError as error:
        raise episode.failure(f"its messages cannot be rendered for the policy: {error}") from error


def env_config(kwargs: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> DictConfig:
    """Settings of an environment: fields are attributes and keys, as skyrl-gym's environments read them; read-only,
    since samples share it. Args: extra: the user's own values, as `extra`.
    """
    config = OmegaConf.create({"extra": dict(extra or {}), **kwargs})
    OmegaConf.set_readonly(config, True)
    return config


def check_environments(config: Config, train: Sequence[Prompt], val: Sequence[Prompt], *, are_created: bool) -> None:
    """Check the environments that rows ask for, and that the configured one is among them.

    Args: train, val: prompts; are_created: whether the rollout creates one for each sample.
    Raises: ValueError for an environment that is unknown, not used, defines no step, whose constructor takes other
        arguments, or that cannot be created for the first row of any set of columns; for settings of an unknown one.
    """
    prompts: dict[tuple[str, frozenset[tuple[str, bool]]], Prompt] = {}
    for prompt in (*train, *val):
        columns = frozenset((name, value is None) for name, value in prompt.extras.items())
        prompts.setdefault((prompt.env_class, columns), prompt)
    env_classes = dict.fromkeys(env_class for env_class, _ in prompts)
    for env_class in env_classes:
        try:
            env_creator(env_class)
            if are_created:
                check_creator(env_class)
        except ValueError as error:
            raise ValueError(f"{error}{_asked(config, env_class)}") from error
    if train and config.environment.reward_fn:  # rows of the evaluation alone would hide that it is not trained with
        _check_is_used(config, list(dict.fromkeys(prompt.env_class for prompt in train)), "training row")
    elif train or config.environment.reward_fn:
        _check_is_used(config, list(env_classes), "row")
    if not are_created:
        return
    for name in config.environment.env_kwargs:
        if not is_known(name):
            raise ValueError(f"environment.skyrl_gym.env_kwargs.{name} is read by nobody: {unknown(name)}")
    for prompt in prompts.values():
        _check_is_created(config, prompt)


def _asked(config: Config, env_class: str) -> str:
    return "" if env_class == config.environment.env_class else " (a row asks for it, in its column env_class)"


def _check_is_used(config: Config, used: Sequence[str], row: str) -> None:
    given, functions = config.environment.env_class, config.environment.reward_fn
    if ("reward_fn" if functions else given) in used or (given == DEFAULT_ENV_CLASS and not functions):
        return
    key, value = ("reward_fn", ", ".join(functions)) if functions else ("env_class", given)
    remedy = "Set data.columns.env_class=null to ignore that column"
    raise ValueError(
        f"environment.{key} is {value}: no {row} uses it, since each has an env_class ({', '.join(used)}). {remedy}"
        + ("" if functions else f", or environment.env_class={used[0]}")
    )


def _check_is_created(config: Config, prompt: Prompt) -> None:
    name = prompt.env_class
    kwargs = config.environment.env_kwargs.get(name, {})
    extras = {**prompt.extras, "max_turns": config.generator.max_turns}
    if problem := row_problem(name, env_config(kwargs, config.extra), extras):
        raise ValueError(
            f"the environment {name}{_asked(config, name)} cannot be created for {prompt.name}, whose row has "
            f"the columns {', '.join(prompt.extras) or 'prompt alone'}: {problem}. "
            + (
                "Add the column (data.columns), or give the argument a default"
                if name == "reward_fn"
                else f"Add what is missing to the rows, or to environment.skyrl_gym.env_kwargs.{name}"
            )
        )
