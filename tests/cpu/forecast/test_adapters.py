"""Forecasts count the adapters that a policy really trains, and what its layers keep with them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import AutoConfig

from skyrl_train.config.policy import Layout, LoraConfig
from skyrl_train.forecast import adapters
from skyrl_train.forecast.activations import kept
from skyrl_train.forecast.adapters import adapted_layers, num_sent
from skyrl_train.forecast.layout import stages
from skyrl_train.hf.adapter import linear_shapes, targets
from skyrl_train.hf.matrices import layers
from skyrl_train.megatron.model.model import build_model
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.passes.packing import Packer
from skyrl_train.megatron.verify.layout_check import share_of
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from tests.support.adapters import lora_config
from tests.support.families import FAMILIES, make_trial
from tests.support.layouts import layout, model

TARGETS = {
    "all": ("all-linear",),
    "queries and values": ("q_proj", "v_proj"),
    "attention": (r"self_attn\.\w+",),
    "up": (r"up_proj|w3",),
    "down": ("down_proj|w2",),
    "some layers": (r"model\.layers\.[13]\..*",),
}
LATENT = {"queries and values": ("q_a_proj|q_proj", "kv_a_proj_with_mqa", "kv_b_proj")}
SHORT, LONG = 24, 56
"""Tokens of the micro-batches that are compared."""


def chosen(family: str, what: str, **changes: Any) -> LoraConfig:
    is_latent = "kv_lora_rank" in FAMILIES[family][1]
    return lora_config(target_modules=(LATENT if is_latent else {}).get(what, TARGETS[what]), **changes)


def forecast_of(family: str, lora: LoraConfig | None, sizes: dict[str, Any], processes: int = 1) -> list[Any]:
    laid = Layout(layout(processes, sizes).megatron, processes)
    return stages(AutoConfig.from_pretrained(model(family)), laid, lora)


def trained(rendezvous: Rendezvous, arguments: tuple[Any, Any, LoraConfig]) -> tuple[int, int]:
    """Number of trained parameters of a rank, of experts and others, counted in the policy itself."""
    path, one, lora = arguments
    join(rendezvous, one.megatron, 1)
    found = [0, 0]
    for module in build_model(str(path), one.megatron, torch.float32, trainable=True, lora=lora).modules:
        for name, parameter in module.named_parameters():
            found[".experts." not in name] += parameter.numel() if parameter.requires_grad else 0
    return found[0], found[1]


@pytest.mark.parametrize("what", TARGETS)
@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe", "mixtral", "deepseek_v3", "deepseek_v3_without_q_lora"])
def test_trained_parameters_are_those_of_the_policy(family: str, what: str):
    lora = chosen(family, what)
    (found,) = run_on_ranks(trained, (model(family), layout(1, {}), lora), 1, timeout_s=120)
    (stage,) = forecast_of(family, lora, {})
    assert (stage.trained.experts, stage.trained.dense) == found


@pytest.mark.parametrize("what", ["all", "queries and values", "up", "down"])
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"ep": 2, "tp": 2, "etp": 1}, {"pp": 2}], ids=str)
def test_every_rank_has_its_part(sizes: dict[str, Any], what: str):
    for family in ("qwen3_moe", "deepseek_v3"):
        lora = chosen(family, what)
        found = run_on_ranks(trained, (model(family), layout(2, sizes), lora), 2, timeout_s=120)
        made = forecast_of(family, lora, sizes, 2)
        expected = [(stage.trained.experts, stage.trained.dense) for stage in made]
        assert found == (expected if "pp" in sizes else expected * 2)


@pytest.mark.parametrize("family", FAMILIES)
def test_modules_have_the_names_and_sizes_of_the_checkpoint(family: str):
    """What is sent alone has a row of B for adapted modules only."""
    shapes, config = linear_shapes(str(model(family))), AutoConfig.from_pretrained(model(family))
    for what in ("all", "queries and values"):
        lora = chosen(family, what)
        assert num_sent(layers(config), lora) == sum(4 * sum(shape) for shape in targets(shapes, lora).values())


def saved(rendezvous: Rendezvous, arguments: tuple[Any, Any, LoraConfig]) -> list[int]:
    """Bytes that autograd keeps of a forward pass, beside parameters, for SHORT and LONG tokens."""
    path, one, lora = arguments
    ranks = join(rendezvous, one.megatron, 1)
    built = build_model(str(path), one.megatron, torch.float32, trainable=True, lora=lora)
    own = {
        tensor.untyped_storage().data_ptr()
        for module in built.modules
        for tensor in [*module.parameters(), *module.buffers()]
    }
    assert built.lora is not None
    built.lora.switch.dropping = True
    found = []
    for tokens in (SHORT, LONG):
        batch = share_of(make_trial(path, [tokens]), one, ranks)
        micro_batch = Packer.of_layout(sequence_parallel=False).pack(batch, batch.mini_batches[0][0])
        storages: dict[int, Any] = {}

        def pack(tensor: torch.Tensor, storages: dict[int, Any] = storages) -> torch.Tensor:
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            output = built.chunks[0](
                input_ids=micro_batch.token_ids,
                position_ids=micro_batch.position_ids,
                attention_mask=None,
                packed_seq_params=micro_batch.packed,
            )
        found.append(sum(storage.nbytes() for address, storage in storages.items() if address not in own))
        del output
    return found


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("family", ["qwen3", "qwen2_moe", "deepseek_v3"])
def test_layers_keep_the_inputs_of_adapted_modules_alone(family: str, dropout: float, monkeypatch: pytest.MonkeyPatch):
    """What more modules keep than queries and values do: differences, as the rest depends on the device."""
    monkeypatch.setattr(adapters, "MASK", 4)  # on the CPU of float32
    config, one = AutoConfig.from_pretrained(model(family)), layout(1, {})
    measured, forecasts = {}, {}
    for what in ("queries and values", "attention", "all"):
        lora = chosen(family, what, dropout=dropout)
        ((short, long),) = run_on_ranks(saved, (model(family), one, lora), 1, timeout_s=120)
        each = [kept(config, layer, Layout(one.megatron, 1), 4) for layer in adapted_layers(layers(config), lora)]
        per_token = (long - short) / (LONG - SHORT)
        measured[what] = torch.tensor([per_token, short - SHORT * per_token])
        forecasts[what] = torch.tensor([sum(layer.layer for layer in each), sum(layer.fixed for layer in each)])
    copied = 0 if dropout else 4 * 64 * 4  # on the CPU attention's output is not what the projection gets
    for what in ("attention", "all"):
        more = (measured[what] - measured["queries and values"]).tolist()
        expected = (forecasts[what] - forecasts["queries and values"]).tolist()
        assert more[0] - copied == pytest.approx(expected[0], abs=24)  # scales of norms
        if family == "qwen3":  # experts keep theirs without autograd
            assert more[1] == pytest.approx(expected[1])


def test_layers_before_the_first_adapter_keep_nothing_unless_they_are_recomputed():
    config, plain = AutoConfig.from_pretrained(model("qwen3")), Layout(layout(1, {}).megatron, 1)
    measured = []
    for first in (2, 3):
        lora = lora_config(target_modules=(rf"model\.layers\.[{first}-3]\..*",))
        ((short, long),) = run_on_ranks(saved, (model("qwen3"), layout(1, {}), lora), 1, timeout_s=120)
        measured.append(long - short)
        (stage,) = stages(config, plain, lora)
        assert [kept(config, layer, plain, 4).layer > 0 for layer in stage.layers] == [n >= first for n in range(4)]
        assert all(layer.is_reached for layer in forecast_of("qwen3", lora, {"pp": 2}, 2)[1].layers)
    assert measured[1] / measured[0] == pytest.approx(1 / 2, rel=0.1)  # the last norm is kept too
    again = layout(1, {}, recompute_granularity="selective", recompute_modules=("core_attn",)).megatron
    (stage,) = stages(config, Layout(again, 1), lora)
    assert all(kept(config, layer, Layout(again, 1), 4).layer > 0 for layer in stage.layers)


def test_cheap_recomputation_frees_no_input_that_an_adapter_keeps():
    config = AutoConfig.from_pretrained(model("qwen3_moe"))
    one = layout(1, {}, recompute_granularity="selective", recompute_modules=("layernorm", "moe_act"))
    for what, freed in (("all", 0), ("up", 2 * 48 * 4)):  # two experts of 48 columns
        layer = adapted_layers(layers(config), chosen("qwen3_moe", what))[0]
        plain, cheap = (kept(config, layer, Layout(each.megatron, 1), 4).layer for each in (layout(1, {}), one))
        assert plain - cheap == freed


def test_a_target_without_a_module_is_an_error():
    with pytest.raises(ValueError, match="contains 'w9': it matches no linear layer"):
        forecast_of("qwen3", lora_config(target_modules=("w9",)), {})
