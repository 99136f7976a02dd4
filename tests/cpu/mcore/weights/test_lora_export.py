"""Adapters leave Megatron whole, as PEFT wrote them, under every layout; merged weights are PEFT's merged weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from skyrl_train.config.policy import LoraConfig, MegatronConfig
from skyrl_train.hf import adapter
from skyrl_train.megatron.lora.adapters import Adapter, base_weights
from skyrl_train.megatron.model.model import build_model
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.optimizer.optimizer import build_optimizer
from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.verify.layout_check import OPTIMIZER, share_of
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.weights import export as weights
from skyrl_train.megatron.weights.export import adapter_specs, export, export_adapter, merged
from skyrl_train.megatron.weights.save import save_adapter, save_hf
from skyrl_train.ranks import Rendezvous
from tests.support.adapters import Adapted, lora_config, peft_model, read_adapter, write_adapter
from tests.support.checkpoints import tensors_of
from tests.support.families import make_trial, without_kl, write_family
from tests.support.layouts import layout

pytestmark = pytest.mark.slow
CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "dense TP2 PP2": ("qwen3_tied", 4, {"tp": 2, "pp": 2}),
    "dense TP4, more ranks than keys": ("qwen3", 4, {"tp": 4}),
    "dense PP2 VPP2": ("qwen2", 2, {"pp": 2, "vpp": 2}),
    "experts EP2": ("qwen3_moe", 2, {"ep": 2}),
    "experts EP2 ETP2": ("mixtral", 4, {"tp": 2, "ep": 2, "etp": 2}),
    "latent attention TP2 EP2": ("deepseek_v3", 2, {"tp": 2, "ep": 2, "etp": 1}),
}


def _save(rendezvous: Rendezvous, arguments: tuple[str, MegatronConfig, LoraConfig, str]) -> None:
    path, megatron, lora, target = arguments
    join(rendezvous, megatron, seed=1)
    model = build_model(path, megatron, torch.float32, trainable=True, lora=lora, seed=5)
    build_optimizer(model, OPTIMIZER)
    assert model.lora is not None
    stream = [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in export_adapter(model.lora)]
    assert stream == [(s.name, s.dtype, tuple(s.shape)) for s in adapter_specs(model.lora, torch.float32)]
    save_hf(model, path, f"{target}/merged", merged(model.lora))
    save_adapter(model.lora, f"{target}/adapter", path, path)


def save(path: Path, lora: LoraConfig, processes: int, sizes: dict[str, Any], target: Path) -> None:
    run_on_ranks(_save, (str(path), layout(processes, sizes).megatron, lora, str(target)), processes, timeout_s=120)


def merge(path: Path, lora: LoraConfig, target: Path) -> dict[str, torch.Tensor]:
    """The merged checkpoint by PEFT; where it cannot hold the adapter, by autograd's reference."""
    if transformers.AutoConfig.from_pretrained(path).model_type == "deepseek_v3":
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        model.load_state_dict({k: v.detach() for k, v in Adapted(path, lora).weights().items()}, strict=False)
    else:
        model = peft_model(path, lora.path).merge_and_unload()
    model.save_pretrained(target)
    return tensors_of(target)


@pytest.mark.parametrize(("family", "processes", "sizes"), CASES.values(), ids=CASES)
def test_an_adapter_leaves_as_it_came_and_merged_weights_are_pefts(
    family: str, processes: int, sizes: dict[str, Any], tmp_path: Path
):
    path = write_family(family, tmp_path / "base")
    lora = write_adapter(tmp_path / "given", path)
    save(path, lora, processes, sizes, tmp_path)

    given, saved = read_adapter(tmp_path / "given"), read_adapter(tmp_path / "adapter")
    assert given.keys() == saved.keys() and all(torch.equal(saved[name], given[name]) for name in given)
    config = adapter.CONFIG_FILE
    assert (tmp_path / "adapter" / config).read_text() == (tmp_path / "given" / config).read_text()

    ours, theirs = tensors_of(tmp_path / "merged"), merge(path, lora, tmp_path / "theirs")
    base = tensors_of(path)
    assert ours.keys() == theirs.keys() == base.keys()
    changed = 0
    for name in theirs:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2e-7)
        changed += not torch.equal(ours[name], base[name])
    assert changed == len(given) // 2


def test_peft_computes_an_adapter_of_experts_as_it_is_meant(tmp_path: Path):
    path = write_family("qwen3_moe", tmp_path / "base")
    lora = write_adapter(tmp_path / "given", path)
    tokens = torch.arange(20)[None]
    theirs = peft_model(path, lora.path)(tokens).logits
    torch.testing.assert_close(theirs, Adapted(path, lora)(tokens).logits, rtol=0, atol=1e-5)
    base = transformers.AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    assert (theirs - base(tokens).logits).abs().max() > 0.01


@pytest.mark.parametrize(
    ("family", "sizes"), [("qwen3_tied", {"tp": 2}), ("deepseek_v3", {"ep": 2, "pp": 1})], ids=["dense", "experts"]
)
def test_every_layout_starts_from_the_same_adapter(family: str, sizes: dict[str, Any], tmp_path: Path):
    path = write_family(family, tmp_path / "base")
    lora = lora_config()
    save(path, lora, 2, sizes, tmp_path)
    first: dict[str, torch.Tensor] = {}
    for module, shape in adapter.targets(adapter.linear_shapes(str(path)), lora).items():
        factors = adapter.initial_factors(module, shape, lora, seed=5)
        first |= zip(adapter.tensor_names(module), factors, strict=True)
    saved = read_adapter(tmp_path / "adapter")
    assert saved.keys() == first.keys() and all(torch.equal(saved[name], first[name]) for name in saved)
    ours, base = tensors_of(tmp_path / "merged"), tensors_of(path)
    assert all(torch.equal(ours[name], base[name]) for name in base), "it changes nothing yet"


def test_chosen_modules_are_adapted_and_no_others(tmp_path: Path):
    path = write_family("qwen3_tied", tmp_path / "base")
    lora = write_adapter(
        tmp_path / "given",
        path,
        target_modules=("q_proj", "v_proj", "mlp.(gate|down)_proj"),
        exclude_modules=(r"layers\.3\.mlp.*",),
    )
    save(path, lora, 2, {"tp": 2}, tmp_path)
    ours, theirs = tensors_of(tmp_path / "merged"), merge(path, lora, tmp_path / "theirs")
    base = tensors_of(path)
    changed = {name for name in base if not torch.equal(ours[name], base[name])}
    for name in base:
        torch.testing.assert_close(ours[name], theirs[name], rtol=0, atol=2e-7)
    attention = {f"model.layers.{i}.self_attn.{m}_proj.weight" for i in range(4) for m in ("q", "v")}
    mlp = {f"model.layers.{i}.mlp.{m}_proj.weight" for i in range(3) for m in ("gate", "down")}
    assert changed == attention | mlp


def _merges(rendezvous: Rendezvous, arguments: tuple[str, MegatronConfig, LoraConfig]) -> tuple[list[int], bool]:
    """Merges of an export with experts together, by three and one by one, and whether the weights are the same."""
    path, megatron, lora = arguments
    join(rendezvous, megatron, seed=1)
    model = build_model(path, megatron, torch.float32, trainable=True, lora=lora, seed=5)
    counts, exports, merge = list[int](), list[dict[str, torch.Tensor]](), Adapter.merged
    assert model.lora is not None
    of_experts = (base_weights(layer) for layer, adapter in model.lora.adapters if adapter.site.is_expert)
    largest = max(weight.numel() for held in of_experts for weight in held)

    def counted(self: Adapter, some: Sequence[torch.Tensor], first: int) -> torch.Tensor:
        counts[-1] += 1
        return merge(self, some, first)

    Adapter.merged = counted  # type: ignore[method-assign]
    for num_bytes in (weights.MERGED_BYTES, 3 * 4 * largest, 1):
        weights.MERGED_BYTES = num_bytes
        counts.append(0)
        exports.append(dict(export(model, torch.float32, merged(model.lora))))
    together, by_three, one_by_one = exports
    others = (by_three, one_by_one)
    return counts, all(torch.equal(whole, other[name]) for name, whole in together.items() for other in others)


def test_weights_of_experts_are_merged_together(tmp_path: Path):
    path = write_family("qwen3_moe", tmp_path / "base")
    lora = write_adapter(tmp_path / "given", path)
    megatron = layout(1, {}).megatron
    ((counts, are_same),) = run_on_ranks(_merges, (str(path), megatron, lora), 1, timeout_s=120)
    config = transformers.AutoConfig.from_pretrained(path)
    layers, experts = config.num_hidden_layers, config.num_experts
    assert are_same and counts[0] == layers * (2 + 2) < counts[1] < counts[2] == layers * (2 + 2 * experts)


def _save_where_it_cannot(rendezvous: Rendezvous, arguments: tuple[str, MegatronConfig, LoraConfig, str]) -> list[str]:
    path, megatron, lora, target = arguments
    join(rendezvous, megatron, seed=1)
    model = build_model(path, megatron, torch.float32, trainable=True, lora=lora, seed=5)
    assert model.lora is not None
    told = []
    for folder in ("/dev/null/saved", target):
        with pytest.raises(ValueError) as error:
            save_adapter(model.lora, folder, path, path)
        told.append(str(error.value))
    Path(target, "config.tmp").rmdir() if rendezvous.rank == 0 else None
    save_adapter(model.lora, target, path, path)
    return told


@pytest.mark.parametrize("sizes", [{"tp": 2}, {"pp": 2}], ids=["TP2", "PP2"])
def test_all_ranks_hear_of_one_that_cannot_write_and_the_next_save_works(sizes: dict[str, Any], tmp_path: Path):
    path = write_family("qwen3_tied", tmp_path / "base")
    lora = write_adapter(tmp_path / "given", path)
    target = tmp_path / "saved"
    (target / "config.tmp").mkdir(parents=True)  # in the way
    arguments = (str(path), layout(2, sizes).megatron, lora, str(target))
    told = run_on_ranks(_save_where_it_cannot, arguments, 2, timeout_s=60)
    assert told[0] == told[1]
    assert "cannot be written" in told[0][0] and "/dev/null/saved" in told[0][0] and "config.tmp" in told[0][1]
    given, saved = read_adapter(tmp_path / "given"), read_adapter(target)
    assert given.keys() == saved.keys() and all(torch.equal(saved[name], given[name]) for name in given)


def _train(rendezvous: Rendezvous, arguments: tuple[Any, ...]) -> dict[str, Any]:
    trial, one, lora, target = arguments
    # With a large eps a step is nearly proportional to the gradient, so rounding is not blown up.
    optimizer = replace(OPTIMIZER, lr=1e-2, adam_eps=1e-2, weight_decay=0.1)
    policy = MegatronPolicy(
        rendezvous,
        trial.model_path,
        one.megatron,
        optimizer,
        without_kl(trial.objective),
        bf16=False,
        seed=1,
        num_optimizer_steps=2,
        lora=lora,
    )
    batch = share_of(trial, one, policy.ranks, num_mini_batches=2)
    before = policy.reference_logprobs(batch)
    first = policy.teacher_logprobs(batch, 2, is_base=True)
    start = policy.prompt_logprobs(batch)
    policy.keep_old_logprobs(batch)
    policy.update(batch)
    after = policy.reference_logprobs(batch)
    teachers = (first, *(policy.teacher_logprobs(batch, 2, is_base) for is_base in (True, False)))
    module = policy.model.modules[0]
    policy.save_hf(target)
    return {
        "reference": (before, after),
        "teachers": teachers,
        "start": start,
        "end": policy.prompt_logprobs(batch),
        "with_gradient": [name for name, p in module.named_parameters() if p.requires_grad or hasattr(p, "main_grad")],
        "all": [name for name, _ in module.named_parameters()],
        "optimizer_numel": sum(p.numel() for group in policy._optimizer.param_groups for p in group["params"]),
        "adapter_numel": sum(p.numel() for p in policy.model.lora.parameters),
    }


def train(path: Path, lora: LoraConfig, processes: int, sizes: dict[str, Any], target: Path) -> list[dict[str, Any]]:
    trial = make_trial(path, [7, 30, 12, 9, 25, 40, 3, 18])
    return run_on_ranks(_train, (trial, layout(processes, sizes), lora, str(target)), processes, timeout_s=120)


@pytest.mark.parametrize(
    ("family", "processes", "sizes"),
    [("qwen3_tied", 2, {"tp": 2}), ("qwen3_tied", 4, {"pp": 2}), ("qwen3_moe", 2, {"ep": 2})],
    ids=["TP2 SP", "DP2 PP2", "EP2"],
)
def test_training_ends_at_the_same_adapter_and_leaves_the_base_unchanged(
    family: str, processes: int, sizes: dict[str, Any], tmp_path: Path
):
    path = write_family(family, tmp_path / "base")
    lora = write_adapter(tmp_path / "given", path)
    parts = train(path, lora, processes, sizes, tmp_path / "many")
    (alone,) = train(path, lora, 1, {}, tmp_path / "one")
    given, ours, expected = (read_adapter(tmp_path / name) for name in ("given", "many/adapter", "one/adapter"))
    assert max(float((ours[name] - given[name]).abs().max()) for name in ours) > 1e-3, "it was trained"
    for name in expected:
        torch.testing.assert_close(ours[name], expected[name], rtol=0, atol=2e-6)
    for part in parts:
        assert part["with_gradient"] == [name for name in part["all"] if ".lora." in name] != []
    assert sum(part["optimizer_numel"] for part in parts) <= sum(part["adapter_numel"] for part in parts)
    assert alone["optimizer_numel"] == alone["adapter_numel"]

    before, after = alone["reference"]
    assert torch.equal(before, after), "the reference did not move"
    first, base, own = (fields["teacher_logprobs"] for fields in alone["teachers"])
    assert torch.equal(first, before) and torch.equal(base, before), "nor did a teacher without adapters"
    assert not torch.equal(own, base)
    assert not torch.equal(alone["start"], before) and not torch.equal(alone["start"], alone["end"])


def _score(rendezvous: Rendezvous, arguments: tuple[Any, ...]) -> Any:
    trial, one, lora = arguments
    policy = MegatronPolicy(
        rendezvous,
        trial.model_path,
        one.megatron,
        OPTIMIZER,
        trial.objective,
        bf16=False,
        seed=1,
        num_optimizer_steps=1,
        lora=lora,
    )
    batch = share_of(trial, one, policy.ranks)
    if lora is not None:
        return policy.reference_logprobs(batch)
    policy.keep_old_logprobs(batch)
    assert policy._old is not None
    return policy._old.values


def test_the_reference_is_the_base_model_bit_for_bit(tmp_path: Path):
    path = write_family("qwen3_moe", tmp_path / "base")
    lora = write_adapter(tmp_path / "given", path)
    trial, one = make_trial(path, [7, 30, 12, 9]), layout(2, {"tp": 2, "etp": 1})
    with_adapter = run_on_ranks(_score, (trial, one, lora), 2, timeout_s=120)[0]
    base = run_on_ranks(_score, (trial, one, None), 2, timeout_s=120)[0]
    assert torch.equal(with_adapter, base)
