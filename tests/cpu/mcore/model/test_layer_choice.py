"""Which layers `transformer_impl` means, where Transformer Engine is installed and where it is not."""

from __future__ import annotations

import pytest
import torch

from skyrl_train.megatron.model import model


@pytest.mark.parametrize(
    ("asked", "dtype", "present", "torch_layers"),
    [
        ("auto", torch.bfloat16, True, False),
        ("auto", torch.float32, True, True),
        ("auto", torch.bfloat16, False, True),
        ("torch", torch.bfloat16, True, True),
        ("transformer_engine", torch.bfloat16, True, False),
        ("transformer_engine", torch.float32, True, "rounds float32 to TensorFloat-32"),
        ("transformer_engine", torch.bfloat16, False, "needs a GPU"),
    ],
)
def test_float32_is_computed_by_the_torch_layers(
    asked: str, dtype: torch.dtype, present: bool, torch_layers: bool | str, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(model, "device_type", lambda: "cuda")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if present else None)
    if isinstance(torch_layers, bool):
        assert model.uses_torch_layers(asked, dtype) is torch_layers
    else:
        with pytest.raises(ValueError, match=torch_layers):
            model.uses_torch_layers(asked, dtype)
