"""Whether a model folder still holds the model on which a run began.

A checkpoint has the trained weights. What else its ranks read comes from that folder: config.json, and the frozen
weights (under LoRA, or of routers). Other values there would silently be computed with, and exported.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from skyrl_train.config.policy import LoraConfig, MegatronConfig
from skyrl_train.hf.checkpoint import some
from skyrl_train.hf.fingerprint import fingerprint, matches
from skyrl_train.hf.ledger import LEDGERS, NO_EFFECT, ONLY

CONFIG_FILE = "config.json"
FREE = NO_EFFECT | {"max_position_embeddings", "output_router_logits", "pad_token_id", "router_aux_loss_coef"}
"""Fields that may change: not computed with, or a limit of lengths."""
FREE_ON_RANKS = FREE | ONLY.keys() | {"architectures"}
"""Also those that are limited to values that compute the same, where Megatron computes the model."""


def has_frozen_weights(lora: LoraConfig, megatron: MegatronConfig) -> bool:
    """Whether checkpoints lack weights of the model, because they are not trained."""
    return lora.rank > 0 or megatron.freeze_moe_router


def identity(folder: str, *, has_frozen_weights: bool) -> dict[str, Any]:
    """JSON values that checkpoints keep. Raises: OSError or ValueError if the folder cannot be read."""
    return {"config": _config(folder), "fingerprint": fingerprint(folder) if has_frozen_weights else None}


def change(kept: Mapping[str, Any], folder: str, *, on_ranks: bool = True) -> str | None:
    """What differs in the folder from the model of this identity, as the end of a sentence that begins with its name;
    None if nothing that matters does, or the checkpoint is older than identities.
    Args: on_ranks: whether Megatron computes it, not an engine. Raises: like `identity`.
    """
    if kept.get("config") is None:
        return None
    before, after = _computed(kept["config"], on_ranks), _computed(_config(folder), on_ranks)
    if fields := [name for name in sorted(before | after) if before.get(name) != after.get(name)]:
        values = [f"{name} is {after.get(name)}, was {before.get(name)}" for name in fields]
        return f"has another {CONFIG_FILE} ({some(values)})"
    is_same = kept["fingerprint"] is None or matches(kept["fingerprint"], folder)  # None if all weights were trained
    return None if is_same else "has other weights"


def _config(folder: str) -> dict[str, Any]:
    values: dict[str, Any] = json.loads(Path(folder, CONFIG_FILE).read_text(encoding="utf-8"))
    return values


def _computed(config: Mapping[str, Any], on_ranks: bool) -> dict[str, Any]:
    """Fields as the installed transformers reads them, with its defaults: files of other versions have other names. Of
    models that only engines know, those of the file.
    """
    if config.get("model_type") not in LEDGERS:
        return {name: value for name, value in config.items() if name not in FREE}
    read = json.loads(json.dumps(AutoConfig.for_model(**config).to_dict()))
    (read.get("rope_parameters") or {}).pop("type", None)  # the older name of rope_type
    free = FREE_ON_RANKS | LEDGERS[read["model_type"]].only.keys() if on_ranks else FREE
    return {name: value for name, value in read.items() if name not in free}
