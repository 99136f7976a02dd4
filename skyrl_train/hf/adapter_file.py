"""An adapter on disk in PEFT's format, refused if it does not match the base model and the configuration."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import safe_open
from torch import Tensor

from skyrl_train.config.policy import LoraConfig, SyncedLoraConfig
from skyrl_train.hf.adapter import (
    CONFIG_FILE,
    FINGERPRINT,
    TENSORS_FILE,
    in_order,
    linear_shapes,
    slot_problem,
    targets,
    tensor_names,
)
from skyrl_train.hf.checkpoint import some
from skyrl_train.hf.fingerprint import matches
from skyrl_train.hf.ledger import names

log = logging.getLogger(__name__)
# Which modules: known from their tensors. Initialisation: init_lora_weights says whether it changed the base model. The
# last two are read by PEFT only together with keys that are refused.
NO_EFFECT = names(
    "peft_type task_type auto_mapping peft_version base_model_name_or_path revision inference_mode r lora_alpha "
    "lora_dropout target_modules exclude_modules layers_to_transform layers_pattern init_lora_weights eva_config "
    "corda_config loftq_config lora_ga_config qalora_group_size megatron_core"
)
"""Keys of adapter_config.json (PEFT 0.21) without effect on what the adapter computes, after the checks below."""
UNCHANGED_BASE = (None, True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of init_lora_weights that leave the base weights unchanged."""


def check(folder: str, lora: LoraConfig) -> None:
    """Warn if it cannot be verified that the adapter is for the base model at `folder`.

    Raises: ValueError if targets match nothing in the base model, the adapter does not match it, or engines cannot
        serve it.
    """
    if lora.rank > 0:
        modules = targets(linear_shapes(folder), lora)
        is_served = isinstance(lora, SyncedLoraConfig) and lora.sync == "adapter"
        if is_served and (problem := slot_problem(lora.rank, modules)):
            raise ValueError(problem)
        if lora.path is not None and (doubt := AdapterFile(lora.path, folder, lora).doubt) is not None:
            log.warning(doubt)


class AdapterFile:
    """An adapter on disk that matches the base model and the configuration; tensors are read one by one."""

    doubt: str | None
    """Why it may still be for another base model."""

    def __init__(self, adapter: str, folder: str, lora: LoraConfig) -> None:
        """Args: adapter: folder in PEFT's format; folder: the base model's.

        Raises: ValueError if it is missing, is for another model, has another rank or alpha, an unsupported kind of
            LoRA, or other modules or shapes than configured.
        """
        self.path = Path(adapter).expanduser()
        missing = [name for name in (CONFIG_FILE, TENSORS_FILE) if not (self.path / name).is_file()]
        if missing:
            raise ValueError(f"adapter {adapter} has no {' and no '.join(missing)}. Name a folder in PEFT's format")
        config = json.loads((self.path / CONFIG_FILE).read_text())
        self._check_config(config, lora)
        # Kept open: the header of 37000 tensors (128 experts in 48 layers) takes 50 ms or more.
        self._file = safe_open(self.path / TENSORS_FILE, "pt")
        found = {name: tuple(self._file.get_slice(name).get_shape()) for name in self._file.keys()}  # noqa: SIM118
        made_for = (self._file.metadata() or {}).get(FINGERPRINT)
        if made_for is not None and not matches(made_for, folder):
            raise ValueError(
                f"adapter {adapter} was trained on another base model than {folder}: their weights differ. Use its "
                "base model"
            )
        self._check_tensors(found, folder, lora)
        self.doubt = None if made_for is not None else self._doubt(config.get("base_model_name_or_path"), folder)

    def _check_config(self, config: dict[str, Any], lora: LoraConfig) -> None:
        key = "trainer.policy.model.lora"
        for name, mine, value in (("r", lora.rank, "rank"), ("lora_alpha", lora.alpha, "alpha")):
            if config.get(name) != mine:
                raise ValueError(
                    f"{key}.{value} is {mine}: adapter {self.path} has {name}={config.get(name)}. Set the same value"
                )
        if config.get("peft_type") != "LORA":
            raise ValueError(f"adapter {self.path} has peft_type={config.get('peft_type')!r}: only LORA is supported")
        if config.get("bias", "none") != "none":
            raise ValueError(f"adapter {self.path} has bias={config['bias']!r}: only none is supported")
        if (start := config.get("init_lora_weights", True)) not in UNCHANGED_BASE:
            raise ValueError(
                f"adapter {self.path} has init_lora_weights={start!r}, which changed the base model's weights. Convert "
                "it with path_initial_model_for_weight_conversion of PEFT's save_pretrained"
            )
        for name in sorted(config.keys() - NO_EFFECT - {"bias"}):
            if config[name]:
                raise ValueError(f"adapter {self.path} has {name}={config[name]!r}: this is not supported")

    def _check_tensors(self, found: Mapping[str, tuple[int, ...]], folder: str, lora: LoraConfig) -> None:
        expected: dict[str, tuple[int, ...]] = {}
        for module, (out_size, in_size) in targets(linear_shapes(folder), lora).items():
            expected |= zip(tensor_names(module), ((lora.rank, in_size), (out_size, lora.rank)), strict=True)
        if missing := sorted(expected.keys() - found.keys(), key=in_order):
            raise ValueError(f"adapter {self.path} lacks tensors of {folder}: {some(missing)}")
        if extra := sorted(found.keys() - expected.keys(), key=in_order):
            raise ValueError(
                f"adapter {self.path} has tensors of modules that are not adapted: {some(extra)}. Add the modules to "
                "trainer.policy.model.lora.target_modules"
            )
        for name, shape in expected.items():
            if found[name] != shape:
                raise ValueError(
                    f"adapter {self.path} is for another model than {folder}: {name} has the shape {found[name]}, not "
                    f"{shape}"
                )

    def _doubt(self, base_model: str | None, folder: str) -> str | None:
        """Matching names and shapes are no proof: a model and its finetunes have the same."""
        if not base_model:
            return f"adapter {self.path} does not name its base model; its shapes match {folder}"
        # A folder of the hub's cache is .../models--OWNER--NAME/snapshots/COMMIT.
        names = {part.lower() for part in re.split(r"/|--", str(Path(folder).expanduser().resolve()))}
        if base_model.rstrip("/").rpartition("/")[2].lower() in names:
            return None
        return (
            f"adapter {self.path} was trained on {base_model}, and the base model is {folder}: the shapes match, but "
            "whether it is the same base model cannot be verified"
        )

    def factors(self, module: str) -> tuple[Tensor, Tensor]:
        """A [r, in] and B [out, r], as stored."""
        a, b = tensor_names(module)
        return self._file.get_tensor(a), self._file.get_tensor(b)
