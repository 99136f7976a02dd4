"""Adapters on disk: what fits a model is read, what does not is refused by name."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import save_file

from skyrl_train.config.policy import LoraConfig
from skyrl_train.engines.settings import engine_arguments
from skyrl_train.hf import adapter, adapter_file
from skyrl_train.hf.adapter_file import AdapterFile
from skyrl_train.hf.fingerprint import fingerprint
from tests.support.adapters import lora_config, read_adapter, write_adapter
from tests.support.families import write_family
from tests.support.settings import MIB, engine_settings

Q_A = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_tied", tmp_path_factory.mktemp("dense"))


@pytest.fixture
def given(dense: Path, tmp_path: Path) -> LoraConfig:
    return write_adapter(tmp_path / "given", dense)


def open_it(lora: LoraConfig, model: Path) -> AdapterFile:
    assert lora.path is not None
    return AdapterFile(lora.path, str(model), lora)


def refused(lora: LoraConfig, model: Path) -> str:
    with pytest.raises(ValueError) as error:
        open_it(lora, model)
    return str(error.value)


def change_config(lora: LoraConfig, **values: object) -> None:
    file = Path(str(lora.path), adapter.CONFIG_FILE)
    file.write_text(json.dumps(json.loads(file.read_text()) | values))


def test_equal_adapters_are_equal_files(dense: Path, tmp_path: Path):
    """safetensors writes metadata in random order."""
    tensors = read_adapter(str(write_adapter(tmp_path / "given", dense).path))
    files = set()
    for _ in range(12):
        adapter.save(tmp_path, tensors, str(dense), "base", lora_config())
        files.add((tmp_path / adapter.TENSORS_FILE).read_bytes())
    assert len(files) == 1
    assert len({file.stat().st_mode for file in tmp_path.glob("adapter_*")}) == 1, "of safetensors others can read none"
    written = read_adapter(str(tmp_path))
    assert written.keys() == tensors.keys() and all(torch.equal(written[name], tensors[name]) for name in tensors)


def test_an_adapter_is_read_as_it_was_written(given: LoraConfig, dense: Path):
    a, b = open_it(given, dense).factors("model.layers.0.self_attn.q_proj")
    tensors = read_adapter(str(given.path))
    assert torch.equal(a, tensors[Q_A]) and torch.equal(b, tensors[Q_A.replace("lora_A", "lora_B")])


def test_all_linear_means_what_peft_means_by_it(dense: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(dense)
    theirs = peft.get_peft_model(model, peft.LoraConfig(r=4, target_modules="all-linear")).state_dict()
    names = {name.replace(".default.", ".") for name in theirs if ".lora_" in name}
    assert names == {name for name, _ in adapter.identity_adapter(str(dense), lora_config())}


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3", "glm4_moe"])
def test_every_expert_and_latent_projection_is_a_target_and_no_router_is(family: str, tmp_path: Path):
    path = write_family(family, tmp_path)
    shapes = adapter.linear_shapes(str(path))
    leaves = {name.split("layers.1.")[1] for name in shapes if "layers.1." in name}
    experts = {f"mlp.experts.{e}.{m}_proj" for e in range(4) for m in ("gate", "up", "down")}
    assert experts <= leaves and not any(name.endswith((".gate", "shared_expert_gate")) for name in leaves)
    assert any("shared_expert" in name for name in leaves)
    if family == "deepseek_v3":
        latent = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
        assert {f"self_attn.{name}" for name in latent} <= leaves


def test_an_adapter_for_another_base_model_is_refused(given: LoraConfig, dense: Path, tmp_path: Path):
    (tmp_path / "tuned").mkdir()
    tensors = {k: v.clone() for k, v in transformers.AutoModelForCausalLM.from_pretrained(dense).state_dict().items()}
    tensors.pop("lm_head.weight")
    tensors["model.embed_tokens.weight"] += 0.1
    save_file(tensors, tmp_path / "tuned/model.safetensors")
    (tmp_path / "tuned/config.json").write_text((dense / "config.json").read_text())
    assert "another base model" in refused(given, tmp_path / "tuned")
    wider = write_family("qwen3_tied", tmp_path / "wider", intermediate_size=128)
    assert "another base model" in refused(given, wider)


def test_an_adapter_without_a_fingerprint_is_known_by_its_shapes(given: LoraConfig, tmp_path: Path):
    file = Path(str(given.path), adapter.TENSORS_FILE)
    save_file(read_adapter(str(given.path)), file)
    wider = write_family("qwen3_tied", tmp_path / "wider", intermediate_size=128)
    message = refused(given, wider)
    assert (
        "for another model" in message and "mlp.down_proj.lora_A.weight has the shape (4, 96), not (4, 128)" in message
    )


def test_the_fingerprint_is_the_same_in_half_precision_and_in_other_files(dense: Path, tmp_path: Path):
    model = transformers.AutoModelForCausalLM.from_pretrained(dense, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert fingerprint(str(tmp_path)) == fingerprint(str(dense))


def test_another_rank_or_alpha_is_refused(given: LoraConfig, dense: Path):
    assert "trainer.policy.model.lora.rank is 8: adapter " in refused(replace(given, rank=8), dense)
    assert "has lora_alpha=8.0. Set the same value" in refused(replace(given, alpha=16.0), dense)


@pytest.mark.parametrize(
    "values",
    [
        {"use_dora": True},
        {"use_rslora": True},
        {"modules_to_save": ["lm_head"]},
        {"bias": "all"},
        {"lora_bias": True},
        {"alora_invocation_tokens": [5, 6]},
        {"kasa_config": {"beta": 1e-4}},
        {"layer_replication": [[0, 2], [1, 3]]},
        {"a_key_of_a_later_peft": "x"},
        {"init_lora_weights": "loftq"},
    ],
    ids=lambda values: next(iter(values)),
)
def test_a_kind_that_is_not_built_is_refused(given: LoraConfig, dense: Path, values: dict[str, object]):
    change_config(given, **values)
    assert next(iter(values)) in refused(given, dense)


def write_with_peft(dense: Path, folder: Path, start: object) -> LoraConfig:
    model = transformers.AutoModelForCausalLM.from_pretrained(dense)
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules="all-linear", task_type="CAUSAL_LM", init_lora_weights=start
    )
    peft.get_peft_model(model, config).save_pretrained(folder)
    return lora_config(path=str(folder))


@pytest.mark.parametrize("start", [True, False, "gaussian", "orthogonal", "mica"])
def test_an_adapter_that_peft_wrote_is_read(start: object, dense: Path, tmp_path: Path):
    a, b = open_it(write_with_peft(dense, tmp_path, start), dense).factors("model.layers.3.mlp.down_proj")
    assert a.shape == (4, 96) and b.shape == (64, 4) and bool(b.any()) == (start in (False, "orthogonal", "mica"))


@pytest.mark.parametrize("start", ["pissa", "pissa_niter_2", "olora"])
def test_an_adapter_that_took_a_part_of_the_base_weights_is_refused(start: str, dense: Path, tmp_path: Path):
    """PEFT writes the factors, and not what is left of the weights that they are to be added to."""
    message = refused(write_with_peft(dense, tmp_path, start), dense)
    assert f"init_lora_weights='{start}', which changed the base model's weights" in message


def test_a_file_is_opened_once_for_all_its_modules(given: LoraConfig, dense: Path, monkeypatch: pytest.MonkeyPatch):
    opened: list[Path] = []
    monkeypatch.setattr(adapter_file, "safe_open", lambda file, *args: opened.append(file) or safe_open(file, *args))
    one = open_it(given, dense)
    for module in adapter.linear_shapes(str(dense)):
        one.factors(module)
    assert opened == [Path(str(given.path), adapter.TENSORS_FILE)]


def test_a_doubt_about_the_base_model_is_reported(
    given: LoraConfig, dense: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    """Where PEFT wrote the file nothing but a name tells which model it is for."""

    def told(model: Path, name: str | None) -> str:
        caplog.clear()
        change_config(given, base_model_name_or_path=name)
        adapter_file.check(str(model), given)
        return caplog.text

    assert told(dense, "owner/another") == "", "its fingerprint tells"
    save_file(read_adapter(str(given.path)), Path(str(given.path), adapter.TENSORS_FILE))
    assert f"trained on owner/another, and the base model is {dense}" in told(dense, "owner/another")
    assert f"does not name its base model; its shapes match {dense}" in told(dense, None)
    named, cached = tmp_path / "Model-1B", tmp_path / "models--owner--Model-1B/snapshots/0123"
    for folder in (named, cached):
        shutil.copytree(dense, folder)
        assert told(folder, "owner/model-1b") == told(folder, "/elsewhere/Model-1B/") == ""
        assert "trained on owner/Model-1B-Base" in told(folder, "owner/Model-1B-Base")


def test_missing_and_superfluous_tensors_are_named(given: LoraConfig, dense: Path):
    file, tensors = Path(str(given.path), adapter.TENSORS_FILE), read_adapter(str(given.path))
    assert "trainer.policy.model.lora.target_modules" in refused(replace(given, target_modules=("q_proj",)), dense)
    missing = tensors.pop(Q_A)
    save_file(tensors, file)
    message = refused(given, dense)
    assert "lacks tensors" in message and Q_A in message
    save_file(tensors | {Q_A: missing, Q_A.replace("layers.0", "layers.9"): missing.clone()}, file)
    assert "that are not adapted: base_model.model.model.layers.9" in refused(given, dense)


def test_a_missing_adapter_is_refused(given: LoraConfig, dense: Path):
    Path(str(given.path), adapter.CONFIG_FILE).unlink()
    assert "has no adapter_config.json" in refused(given, dense)


@pytest.mark.parametrize("key", ["target_modules", "exclude_modules"])
def test_a_target_that_matches_no_module_is_refused(dense: Path, key: str):
    with pytest.raises(
        ValueError, match=rf"{key} contains 'qkv_proj': it matches no linear layer .* down_proj, gate_proj"
    ):
        adapter.targets(adapter.linear_shapes(str(dense)), lora_config(**{key: ("qkv_proj",)}))
    with pytest.raises(ValueError, match=rf"{key} contains '\(': not a regular expression"):
        adapter.targets(adapter.linear_shapes(str(dense)), lora_config(**{key: ("(",)}))


def test_excluding_everything_is_refused(dense: Path):
    with pytest.raises(ValueError, match="excludes every module"):
        adapter.targets(adapter.linear_shapes(str(dense)), lora_config(exclude_modules=("all-linear",)))


def told_to_vllm(model: Path, lora: LoraConfig) -> dict[str, Any]:
    return engine_arguments(engine_settings(str(model), "m", "float32", 8, kv_cache_memory_gb=MIB, lora=lora), "cpu")


def test_a_rank_beyond_vllms_slots_is_refused(dense: Path):
    with pytest.raises(ValueError, match="rank is 1024: vLLM has slots up to 512"):
        told_to_vllm(dense, lora_config(rank=1024))
    assert told_to_vllm(dense, lora_config(rank=9))["max_lora_rank"] == 16


def test_an_adapter_that_vllm_would_not_serve_is_refused(tmp_path: Path):
    latent = write_family("deepseek_v3", tmp_path)
    for refuse in (told_to_vllm, lambda model, lora: adapter_file.check(str(model), lora)):
        with pytest.raises(ValueError, match=r"includes kv_b_proj.*exclude_modules=\[kv_b_proj\].*sync=merged"):
            refuse(latent, lora_config(sync="adapter"))
    lora = lora_config(sync="adapter", exclude_modules=("kv_b_proj",))
    assert "kv_b_proj" not in told_to_vllm(latent, lora)["lora_target_modules"]
    adapter_file.check(str(latent), lora)
    adapter_file.check(str(latent), lora_config(sync="merged"))


def test_the_identity_adapter_needs_the_shapes_alone(tmp_path: Path):
    """A checkpoint of 16 GiB whose file holds nothing but its header."""
    shape = [1 << 16, 1 << 16]
    names = ["model.layers.0.self_attn.q_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    size = 2 * shape[0] * shape[1]
    header = {
        name: {"dtype": "BF16", "shape": shape, "data_offsets": [i * size, (i + 1) * size]}
        for i, name in enumerate(names)
    }
    text = json.dumps(header).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + len(names) * size)
    (tmp_path / "config.json").write_text("{}")
    lora = lora_config(rank=1)
    tensors = dict(adapter.identity_adapter(str(tmp_path), lora))
    assert len(tensors) == 4 and all(tensor.numel() == shape[0] for tensor in tensors.values())
    for name, tensor in tensors.items():
        is_a = "lora_A" in name
        assert bool(tensor.any()) == is_a and tensor.untyped_storage().nbytes() == 4 * (1 if is_a else shape[0])


@pytest.mark.parametrize("method", ["kaiming", "xavier", "normal"])
def test_a_starts_spread_as_its_init_method_says(method: str):
    a, b = adapter.initial_factors("m", (7, 4096), lora_config(rank=8, init_method=method), seed=0)
    # Standard deviations: of a uniform draw within b, b / sqrt(3).
    expected = {
        "kaiming": (1 / 4096) ** 0.5 / 3**0.5,
        "xavier": (6 / (4096 + 8)) ** 0.5 / 3**0.5,
        "normal": 1 / 8,
    }[method]
    assert float(a.std()) == pytest.approx(expected, rel=0.03) and not b.any()
    other, _ = adapter.initial_factors("n", (7, 4096), lora_config(rank=8, init_method=method), seed=0)
    assert not torch.equal(a, other)
