"""Known model shapes (shapes.yaml), for forecasts and benchmarks without a checkpoint."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import yaml


@functools.cache
def shapes() -> dict[str, dict[str, Any]]:
    """Name -> fields of config.json."""
    table: dict[str, dict[str, Any]] = yaml.safe_load(Path(__file__).with_name("shapes.yaml").read_text())
    return table


def model_config(shape: str, num_layers: int | None = None) -> Any:
    """The configuration of a Qwen3 model of this shape. Raises: KeyError for an unknown shape."""
    from transformers import Qwen3Config, Qwen3MoeConfig

    fields = dict(shapes()[shape])
    if num_layers is not None:
        fields["num_hidden_layers"] = num_layers
    kind = Qwen3MoeConfig if "num_experts" in fields else Qwen3Config
    return kind(
        **fields,
        max_position_embeddings=40_960,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        dtype="bfloat16",
        eos_token_id=None,
        bos_token_id=None,
        pad_token_id=None,
    )
