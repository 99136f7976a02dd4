"""Checks that the weights in a model folder are those of its config.json, from the headers of its files.

Expected names and shapes are those of the Hugging Face model of the configuration, built without memory for weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from skyrl_train.hf.checkpoint import some, tensor_files, tensor_shapes

Shapes = Mapping[str, tuple[int, ...]]
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
ROWS = 8192
"""Rows of a tied head compared at a time."""
REMEDY = "Download or copy the checkpoint again, with the config.json that it was saved with"


def check_weights(config: PretrainedConfig, key: str, path: str, folder: str, value_head: str | None = None) -> None:
    """Compare names and shapes of the tensors in `folder` with those of the configuration.

    Args: key and its value, path, for errors; value_head: name of the head of a critic, which may have no other.
    Raises: ValueError.
    """
    try:
        found = tensor_shapes(folder)
    except ValueError as error:
        raise ValueError(f"{key} is {path}: {error}") from error
    try:
        expected = shapes_of(config)
    except Exception as error:  # sizes that do not divide
        raise ValueError(
            f"{key} is {path}: transformers cannot build the model of its config.json: {type(error).__name__}: "
            f"{' '.join(str(error).split()).rstrip('.')}. {REMEDY}"
        ) from error
    if value_head is not None:
        expected = {name: shape for name, shape in expected.items() if name != HEAD}
        found = {name: shape for name, shape in found.items() if name not in (HEAD, f"{value_head}.weight")}
    problems = [*weight_problems(config, expected, found)]
    if problems := problems or tied_head_problems(config, folder):
        raise ValueError(f"{key} is {path}: {'; '.join(problems)}. {REMEDY}")


def tied_head_problems(config: PretrainedConfig, folder: str) -> list[str]:
    """A head that differs from the tied embedding: Hugging Face would use it."""
    files = tensor_files(folder)
    if not config.tie_word_embeddings or HEAD not in files or EMBEDDING not in files:
        return []
    with safe_open(files[HEAD], "pt") as heads, safe_open(files[EMBEDDING], "pt") as embeddings:
        head, embedding = heads.get_slice(HEAD), embeddings.get_slice(EMBEDDING)
        same = head.get_shape() == embedding.get_shape() and all(
            head[start : start + ROWS].equal(embedding[start : start + ROWS])
            for start in range(0, head.get_shape()[0], ROWS)
        )
    if same:
        return []
    return [
        f"tie_word_embeddings is true, but {HEAD} differs from {EMBEDDING}. Set it to false in config.json to train "
        f"both, or remove {HEAD} from the checkpoint"
    ]


def shapes_of(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Tensor -> shape in a checkpoint (transformers fuses experts in memory, not in files); DeepSeek-V3 takes 1 s."""
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config, trust_remote_code=False)
    tensors = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def weight_problems(config: PretrainedConfig, expected: Shapes, found: Shapes) -> Iterator[str]:
    """Tensors that are missing, have another shape, or are not part of the model."""
    wrong = [name for name in expected if name in found and found[name] != expected[name]]
    if wrong:
        shown = [f"{name} is {list(found[name])}, not {list(expected[name])}" for name in wrong]
        yield f"{len(wrong)} tensors have other shapes than in its config.json: {some(shown)}"
    tied = getattr(config, "tie_word_embeddings", False)
    missing = [name for name in expected if name not in found and not (tied and name == HEAD)]
    if missing:
        yield f"{len(missing)} tensors of its config.json are missing: {some(missing)}"
    unknown = sorted(name for name in found if name not in expected and not _is_needless(name, config))
    if unknown:
        kind = config.model_type
        yield f"{len(unknown)} tensors are not part of the {kind} model of its config.json: {some(unknown)}"


def _is_needless(name: str, config: PretrainedConfig) -> bool:
    """Whether a tensor is a quantisation scale, a rotary table or of a layer for multi-token prediction."""
    first = config.num_hidden_layers
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    num_predicting = int(getattr(config, "num_nextn_predict_layers", None) or 0)  # after the model's own
    predicts = layer is not None and first <= int(layer.group(1)) < first + num_predicting
    return predicts or name.endswith(("_scale_inv", "inv_freq"))
