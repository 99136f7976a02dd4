"""LoRA adapters of tiny models, and references that compute with them: PEFT, and W + alpha / r * B A by autograd."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import torch
import transformers
from torch import Tensor

from skyrl_train.config import load_config
from skyrl_train.config.policy import SyncedLoraConfig
from skyrl_train.hf import adapter


def lora_config(**changes: Any) -> SyncedLoraConfig:
    return replace(load_config().trainer.policy.model.lora, **{"rank": 4, "alpha": 8.0, **changes})


def write_adapter(folder: Path, model: Path, **changes: Any) -> SyncedLoraConfig:
    """A random adapter, B not zero, for the model; returns the configuration that starts from it."""
    lora = lora_config(**changes)
    generator = torch.Generator().manual_seed(3)
    tensors = {
        name: 0.1 * torch.randn(tensor.shape, generator=generator)
        for name, tensor in adapter.identity_adapter(str(model), lora)
    }
    adapter.save(folder, tensors, str(model), str(model), lora)
    return replace(lora, path=str(folder))


def read_adapter(folder: str | Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return load_file(Path(folder, adapter.TENSORS_FILE))


def peft_model(model: Path | str, folder: str | Path) -> Any:
    base = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    return peft.PeftModel.from_pretrained(base, folder, is_trainable=True)


def peft_gradients(model: Any) -> dict[str, Tensor]:
    """Of a model without experts, under the names of its file."""
    return {
        name.replace(".default.", "."): parameter.grad
        for name, parameter in model.named_parameters()
        if parameter.requires_grad
    }


class Adapted:
    """Hugging Face's model with every adapted weight replaced by W + alpha / r * B A; also where PEFT 0.21 cannot (an
    MLP beside experts of the same names)."""

    def __init__(self, model: Path | str, lora: SyncedLoraConfig) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
        self.config = self._model.config
        assert lora.path is not None
        self.tensors = {name: tensor.requires_grad_() for name, tensor in read_adapter(lora.path).items()}
        self._scale = lora.alpha / lora.rank

    def __call__(self, tokens: Tensor) -> Any:
        return torch.func.functional_call(self._model, self.weights(), (tokens,))

    def weights(self) -> dict[str, Tensor]:
        """Parameter of transformers 5, which fuses experts -> W + alpha / r * B A."""
        weights: dict[str, Tensor] = dict(self._model.named_parameters())
        experts: dict[str, dict[str, Tensor]] = {}
        for a, b in ((n, n.replace("lora_A", "lora_B")) for n in self.tensors if ".lora_A." in n):
            delta = self._scale * self.tensors[b] @ self.tensors[a]
            module = a.removeprefix(adapter.PREFIX).removesuffix(".lora_A.weight")
            module = module.replace(".block_sparse_moe.", ".mlp.")
            expert = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)", module)
            if expert is None:
                weights[f"{module}.weight"] = weights[f"{module}.weight"] + delta
            else:
                kind = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}.get(expert[3], expert[3])
                experts.setdefault(expert[1], {})[f"{int(expert[2])} {kind}"] = delta
        for stem, deltas in experts.items():
            num = len(weights[f"{stem}.down_proj"])
            up = [torch.cat([deltas[f"{e} gate_proj"], deltas[f"{e} up_proj"]]) for e in range(num)]
            down = [deltas[f"{e} down_proj"] for e in range(num)]
            weights[f"{stem}.gate_up_proj"] = weights[f"{stem}.gate_up_proj"] + torch.stack(up)
            weights[f"{stem}.down_proj"] = weights[f"{stem}.down_proj"] + torch.stack(down)
        return weights

    def gradients(self) -> dict[str, Tensor]:
        return {
            name: torch.zeros_like(tensor) if tensor.grad is None else tensor.grad
            for name, tensor in self.tensors.items()
        }
