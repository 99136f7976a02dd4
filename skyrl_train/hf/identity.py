"""Whether a model folder still holds the model on which a run began.

A checkpoint has the trained weights. What else its ranks read comes from that folder: config.json, and under LoRA the
frozen weights. Other values there would be computed with, and exported, in silence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig

from skyrl_train.hf.checkpoint import fingerprint, some
from skyrl_train.hf.ledger import NO_EFFECT

CONFIG_FILE = "config.json"
FREE = NO_EFFECT | {"architectures", "max_position_embeddings", "pad_token_id"}
"""Fields that may change: they are not computed with, or only limit the length of a sample."""


def identity(folder: str, *, has_frozen_weights: bool) -> dict[str, Any]:
    """JSON values that checkpoints keep. Raises: OSError or ValueError if the folder cannot be read."""
    config = json.loads(Path(folder, CONFIG_FILE).read_text(encoding="utf-8"))
    return {"config": config, "fingerprint": fingerprint(folder) if has_frozen_weights else None}


def change(kept: Mapping[str, Any], folder: str) -> str | None:
    """What differs in the folder from the model with this identity, after "it" or its name; None if nothing that
    matters does, or the checkpoint is older than identities. Raises: like `identity`.
    """
    if kept.get("config") is None:
        return None
    now = identity(folder, has_frozen_weights=kept["fingerprint"] is not None)
    before, after = _computed(kept["config"]), _computed(now["config"])
    if fields := [name for name in sorted(before | after) if before.get(name) != after.get(name)]:
        values = [f"{name} is {after.get(name)}, was {before.get(name)}" for name in fields]
        return f"has another {CONFIG_FILE} ({some(values)})"
    return "has other weights" if now["fingerprint"] != kept["fingerprint"] else None


def _computed(config: Mapping[str, Any]) -> dict[str, Any]:
    """Fields as the installed transformers reads them, with its defaults: files of other versions have other names."""
    read = AutoConfig.for_model(**config).to_dict()
    return {name: value for name, value in json.loads(json.dumps(read)).items() if name not in FREE}
