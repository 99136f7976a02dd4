"""All checks of a model folder before anything starts: its configuration, its weights and how it is computed."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoConfig

from skyrl_train.checks.equivalence import compare_with_hugging_face, known_config
from skyrl_train.checks.tokenizer import check_same_tokens, check_tokenizer, load_tokenizer
from skyrl_train.checks.training import MODEL
from skyrl_train.checks.weights import check_weights
from skyrl_train.config import ConfigError
from skyrl_train.config.policy import MegatronConfig
from skyrl_train.config.rl import TrainerConfig
from skyrl_train.config.training import TrainingConfig
from skyrl_train.engines.vllm.models import model_problems as vllm_model_problems
from skyrl_train.hf.download import download
from skyrl_train.hf.hub import local_folder
from skyrl_train.hf.transformer_config import model_problems as transformer_config_problems

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedTokenizerBase


def checked_folder(
    key: str, path: str, timeout_s: float, value_head: str | None = None
) -> tuple[str, PretrainedConfig]:
    """Folder and configuration of a model; a hub name is downloaded.

    Args: key and its value, path, for errors; timeout_s: of the download; value_head: name of the head of a critic.
    Raises: ValueError.
    """
    download(key, path, timeout_s)
    folder = local_folder(path)
    config = known_config(folder, key)
    check_weights(config, key, path, folder, value_head)
    compare_with_hugging_face(config, folder, key)
    return folder, config


def check_transformer_config(megatron: MegatronConfig, key: str, path: str) -> None:
    """Raises: ConfigError if Megatron would be given other values than those in the config.json of the model at `path`.
    Args: key: of the layout.
    """
    if kwargs := megatron.transformer_config_kwargs:
        folder = local_folder(path)
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
        if problems := list(transformer_config_problems(f"{key}.transformer_config_kwargs", kwargs, config, folder)):
            raise ConfigError(problems)


def check_scoring_models(trainer: TrainerConfig, tokenizer: PreTrainedTokenizerBase, device_type: str | None) -> None:
    """Raises: ValueError for a reference, critic or teacher that cannot score the policy's tokens, has other values in
    its config.json than Megatron would be given, or that engines on devices of this type (None if unknown) cannot load.
    """
    for model in trainer.scoring_models:
        if model.model_path != trainer.policy.model.path:
            head = trainer.algorithm.value_head_prefix if model.is_trained else None
            folder, config = checked_folder(model.path_key, model.model_path, trainer.download_timeout_s, head)
            check_tokenizer(tokenizer, config.vocab_size, model.model_path)
            if model.is_teacher:
                teacher = load_tokenizer(folder, model.path_key, trainer.trust_remote_code)
                check_same_tokens(tokenizer, teacher, model.path_key, model.model_path)
        check_transformer_config(model.megatron_config, f"{model.key}.megatron_config", model.model_path)
    for model in trainer.engine_teachers:
        # Any model that the engine knows; a server's tokens are compared when the run connects.
        download(model.path_key, model.model_path, trainer.download_timeout_s)
        folder = local_folder(model.model_path)
        teacher = load_tokenizer(folder, model.path_key, trainer.trust_remote_code)
        check_same_tokens(tokenizer, teacher, model.path_key, model.model_path)
        given = f"{model.path_key} is {model.model_path}"
        tp, trusted = trainer.teacher.inference_engine_tensor_parallel_size, trainer.trust_remote_code
        if problems := list(_engine_problems(folder, given, device_type, tp, trust_remote_code=trusted)):
            raise ConfigError(problems)


def loaded_from(trainer: TrainingConfig) -> dict[Path, str]:
    """Local folder -> key of the model that the run loads from it, perhaps again when a process is replaced."""
    others = (*trainer.scoring_models, *trainer.engine_teachers) if isinstance(trainer, TrainerConfig) else ()
    paths = {model.model_path: model.path_key for model in others} | {trainer.policy.model.path: MODEL}
    folders = {Path(path).expanduser().resolve(): key for path, key in paths.items()}
    return {folder: key for folder, key in folders.items() if folder.is_dir()}


def require_models_outside(trainer: TrainingConfig) -> None:
    """Raises: ValueError if the run's folder, which a new run renames, holds a model that it loads."""
    run_dir = Path(trainer.run_dir).expanduser().resolve()
    for folder, key in loaded_from(trainer).items():
        if folder.is_relative_to(run_dir):
            raise ValueError(
                f"trainer.run_dir is {run_dir}: a new run renames this folder, and loads {key} from {folder}. Choose "
                "another trainer.run_name"
            )


def _engine_problems(
    folder: str, given: str, device_type: str | None, tp: int, *, trust_remote_code: bool
) -> Iterator[str]:
    """Problems of a teacher's engines. Args: tp: their tensor-parallel size."""
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code).get_text_config()
    except ValueError:  # transformers does not know the architecture, and vLLM may
        return
    yield from vllm_model_problems(config, given, device_type, None)
    if (heads := getattr(config, "num_attention_heads", None)) is not None and heads % tp:
        key = "trainer.teacher.inference_engine_tensor_parallel_size"
        yield f"{given} and {key} is {tp}: it must divide the model's {heads} attention heads"
