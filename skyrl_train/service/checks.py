"""Checks of a service's configuration and model."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from skyrl_train.algorithms.tables import ADVANTAGES, LOSSES, compares_with_greedy
from skyrl_train.checks.engines import check_vllm
from skyrl_train.checks.model import model_problems
from skyrl_train.checks.model_folder import check_scoring_models, check_transformer_config, checked_folder
from skyrl_train.checks.rl import check
from skyrl_train.checks.tokenizer import check_tokenizer, load_tokenizer
from skyrl_train.checks.training import POLICY, adapter_problems
from skyrl_train.cluster.session import known_device_type
from skyrl_train.config import Config, ConfigError
from skyrl_train.hf import adapter_file

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def check_service(config: Config, files: bool = True) -> None:
    """Raises: ConfigError with all problems. Data keys are ignored. Args: files: like `check`."""
    check(config, None, files=False)
    problems = [*_problems(config)]
    if files:
        problems += [*model_problems(config), *adapter_problems(config.trainer.policy.model.lora)]
    if problems:
        raise ConfigError(problems)


def checked_model(config: Config) -> tuple[PretrainedConfig, PreTrainedTokenizerBase]:
    """Raises: ValueError for a missing model, or weights, tokenizer, adapter or reference that do not fit."""
    key, path, trainer = "trainer.policy.model.path", config.trainer.policy.model.path, config.trainer
    folder, model = checked_folder(key, path, trainer.download_timeout_s)
    check_transformer_config(trainer.policy.megatron_config, POLICY, folder)
    check_vllm(config, model, known_device_type())
    adapter_file.check(folder, trainer.policy.model.lora)
    tokenizer = load_tokenizer(folder, key, trainer.trust_remote_code)
    check_tokenizer(tokenizer, model.vocab_size, path)
    check_scoring_models(trainer, tokenizer, known_device_type())
    return model, tokenizer


def _problems(config: Config) -> Iterator[str]:
    if config.trainer.resume_mode is not None:
        yield (
            f"trainer.resume_mode is {config.trainer.resume_mode}: a service writes no checkpoints. Set it to null, "
            "and trainer.policy.model.path to the last save"
        )
    if config.trainer.source != "on_policy" or config.generator.rollout is not None:
        yield ("trainer.source or generator.rollout is set: a service trains on samples of its clients. Remove both")
    shaping = {
        "generator.zero_reward_on_non_stop": config.generator.zero_reward_on_non_stop,
        "generator.apply_overlong_filtering": config.generator.apply_overlong_filtering,
        "trainer.algorithm.overlong_buffer.len": config.trainer.algorithm.overlong_buffer.len,
        "trainer.algorithm.zero_variance_filter": config.trainer.algorithm.zero_variance_filter,
        "trainer.algorithm.dynamic_sampling.type": config.trainer.algorithm.dynamic_sampling.type,
        "trainer.over_sampling_batch_size": config.trainer.over_sampling_batch_size,
    }
    if config.trainer.algorithm.distillation.distillation_hint is not None:
        yield (
            "trainer.algorithm.distillation.distillation_hint is set: it is filled from rows of training data, and the "
            "jobs of a service have tokens alone. Set it to null"
        )
    for key, value in shaping.items():
        if value not in (None, False):
            yield (
                f"{key} is {str(value).lower()}: a service trains on the rewards and masks that its clients submit. "
                f"Set it to {'false' if value is True else 'null'}"
            )
    for table in (ADVANTAGES, LOSSES):
        name = getattr(config.trainer.algorithm, table.key.rpartition(".")[2])
        place = name.partition(":")[0] if ":" in name else table.place(name)
        if place == "__main__" or (":" not in name and place not in (None, *config.trainer.custom_modules)):
            yield (
                f"{table.key} is {name}, which this program registered: a service is another process. Name it "
                "module:attribute, or add the module that registers it to trainer.custom_modules"
            )
    estimator = config.trainer.algorithm.advantage_estimator
    lacks = {
        "no critic": config.trainer.algorithm.needs_critic,
        "no greedy responses": compares_with_greedy(estimator),
        "no named rewards": estimator == "gdpo",
    }
    for lack in (name for name, needed in lacks.items() if needed):
        yield (
            f"trainer.algorithm.advantage_estimator is {estimator}: a service has {lack}. Use grpo, rloo or reinforce++"
        )
    scheduler = config.trainer.policy.optimizer_config.scheduler
    if scheduler != "constant_with_warmup":
        yield (
            f"trainer.policy.optimizer_config.scheduler is {scheduler}: it decays towards the last step, and a "
            "service has none. Use constant_with_warmup"
        )
