"""Whether the weights in a model folder are those that its config.json describes: from the headers of its files.

What a model must have is what the Hugging Face model of its configuration has, built without memory for its weights.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import torch
from transformers import AutoModelForCausalLM, PretrainedConfig
from transformers.core_model_loading import revert_weight_conversion

from skyrl_train.checkpoint import tensor_shapes

Shapes = Mapping[str, tuple[int, ...]]
NUM_SHOWN = 3
"""Tensors that an error names."""
CURE = "Download or copy the checkpoint again, with the config.json that it was saved with"


def check_weights(config: PretrainedConfig, key: str, path: str, folder: str) -> None:
    """Compare names and shapes of the tensors in `folder` with those that the configuration asks for.

    Args: key and its value, path, for errors. Raises: ValueError that says what is wrong.
    """
    try:
        found = tensor_shapes(folder)
    except ValueError as error:
        raise ValueError(f"{key} is {path}: {error}") from error
    try:
        expected = shapes_of(config)
    except Exception as error:  # sizes that do not divide
        raise ValueError(
            f"{key} is {path}: transformers cannot build the model of its config.json: {_line(error)}. {CURE}"
        ) from error
    if problems := [*weight_problems(config, expected, found)]:
        raise ValueError(f"{key} is {path}: {'; '.join(problems)}. {CURE}")


def shapes_of(config: PretrainedConfig) -> dict[str, tuple[int, ...]]:
    """Tensor -> shape in a checkpoint of such a model; transformers fuses experts in memory and splits them in files.

    45,000 tensors of DeepSeek-V3 take a second.
    """
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = revert_weight_conversion(model, model.state_dict())
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def weight_problems(config: PretrainedConfig, expected: Shapes, found: Shapes) -> Iterator[str]:
    """Tensors that are missing, have another shape, or belong to no part of the model."""
    wrong = [name for name in expected if name in found and found[name] != expected[name]]
    if wrong:
        shown = [f"{name} is {list(found[name])}, not {list(expected[name])}" for name in wrong[:NUM_SHOWN]]
        yield f"{len(wrong)} of its tensors have other shapes than its config.json says: {_and_more(shown, len(wrong))}"
    tied = getattr(config, "tie_word_embeddings", False)
    missing = [name for name in expected if name not in found and not (tied and name == "lm_head.weight")]
    if missing:
        yield f"{len(missing)} tensors that its config.json asks for are missing: {_and_more(missing, len(missing))}"
    unknown = sorted(name for name in found if name not in expected and not _is_needless(name, config))
    if unknown:
        yield (
            f"it has {len(unknown)} tensors that a {config.model_type} model of its config.json does not have: "
            f"{_and_more(unknown, len(unknown))}"
        )


def _is_needless(name: str, config: PretrainedConfig) -> bool:
    """Scales of a quantised checkpoint, rotary tables, and as many layers of multi-token prediction as it names."""
    first = config.num_hidden_layers
    layer = re.match(r"model\.layers\.(\d+)\.", name)
    predicts = layer is not None and first <= int(layer.group(1)) < first + num_prediction_layers(config)
    return predicts or name.endswith(("_scale_inv", "inv_freq"))


def num_prediction_layers(config: PretrainedConfig) -> int:
    """Layers of multi-token prediction behind the model's own."""
    return int(getattr(config, "num_nextn_predict_layers", None) or 0)


def _and_more(names: list[str], num: int) -> str:
    more = f" and {num - NUM_SHOWN} more" if num > NUM_SHOWN else ""
    return ", ".join(names[:NUM_SHOWN]) + more


def _line(error: Exception) -> str:
    """The error in one line, without a full stop."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}".rstrip(".")
