"""A model folder whose files are not what its config.json says is refused with a sentence, from headers alone."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import PreTrainedTokenizerFast

from skyrl_train.checks.model_folder import check_scoring_models, check_transformer_config
from skyrl_train.checks.tokenizer import check_same_tokens, check_tokenizer, load_tokenizer
from skyrl_train.checks.weights import check_weights, shapes_of
from skyrl_train.config import ConfigError, load_config
from tests.support.families import FAMILIES, write_family
from tests.support.tiny import chatml_tokenizer, tiny_tokenizer, write_tiny_model

KEY = "trainer.policy.model.path"


def check(folder: Path) -> None:
    check_weights(transformers.AutoConfig.from_pretrained(folder), KEY, str(folder), str(folder))


def refusal(folder: Path) -> str:
    with pytest.raises(ValueError) as caught:
        check(folder)
    assert str(caught.value).startswith(f"{KEY} is {folder}: ")
    return str(caught.value)


def change_config(folder: Path, **changes: Any) -> None:
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, **changes}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("models") / "intact", tie_word_embeddings=False)


@pytest.fixture
def model(intact: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(intact, tmp_path / "model"))


@pytest.mark.parametrize("name", FAMILIES)
def test_a_checkpoint_of_each_family_is_accepted_and_refused_without_any_one_kind_of_its_tensors(
    name: str, tmp_path: Path
):
    folder = write_family(name, tmp_path / "model")
    check(folder)
    tensors = load_file(folder / "model.safetensors")
    last_of_kind = {"".join(part for part in key.split(".") if not part.isdigit()): key for key in tensors}
    for key in last_of_kind.values():
        save_file({k: v for k, v in tensors.items() if k != key}, folder / "model.safetensors")
        assert f"1 tensors of its config.json are missing: {key}" in refusal(folder)


@pytest.mark.parametrize(
    ("changes", "tensor"),
    [
        ({"hidden_size": 32}, "model.embed_tokens.weight is [64, 128], not [64, 32]"),
        ({"num_attention_heads": 8}, "model.layers.0.self_attn.q_proj.weight is"),
        ({"num_key_value_heads": 1}, "model.layers.0.self_attn.k_proj.weight is"),
        ({"head_dim": 8}, "model.layers.0.self_attn.q_proj.weight is"),
        ({"intermediate_size": 80}, "model.layers.0.mlp.gate_proj.weight is"),
        ({"vocab_size": 65}, "model.embed_tokens.weight is [64, 128], not [65, 128]"),
        ({"num_hidden_layers": 3, "layer_types": None}, "of its config.json are missing: model.layers.2."),
        ({"num_hidden_layers": 1, "layer_types": None}, "11 tensors are not part of the qwen3 model of its"),
        ({"attention_bias": True}, "model.layers.0.self_attn.q_proj.bias"),
        ({"model_type": "llama"}, "4 tensors are not part of the llama model of its config.json"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)  # fmt: skip
def test_a_configuration_of_another_model_is_refused_with_the_tensors_that_differ(
    model: Path, changes: dict[str, Any], tensor: str
):
    change_config(model, **changes)
    assert tensor in refusal(model)


def test_a_tied_head_may_be_left_out_or_written_and_another_may_not_be_missing(model: Path):
    change_weights(model, lambda tensors: tensors.pop("lm_head.weight"))
    assert "1 tensors of its config.json are missing: lm_head.weight" in refusal(model)
    change_config(model, tie_word_embeddings=True)
    check(model)
    change_weights(
        model, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    check(model)
    change_weights(model, lambda tensors: tensors["lm_head.weight"][-1, -1:].add_(1))
    assert "lm_head.weight differs from model.embed_tokens.weight" in refusal(model)
    change_weights(model, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(65, 128)}))
    assert "lm_head.weight is [65, 128], not [64, 128]" in refusal(model)


def test_only_the_prediction_layers_that_are_named_may_follow_the_models_own(tmp_path: Path):
    folder = write_family("glm4_moe", tmp_path / "model")
    scale = "model.layers.1.mlp.experts.0.up_proj.weight_scale_inv"
    scales = {scale: torch.ones(1), "model.rotary.inv_freq": torch.ones(2)}
    change_weights(folder, lambda tensors: tensors.update({"model.layers.4.eh_proj.weight": torch.ones(2), **scales}))
    change_config(folder, num_nextn_predict_layers=0)
    assert "1 tensors are not part of the glm4_moe model of its config.json: model.layers.4.eh_proj" in refusal(folder)
    change_config(folder, num_nextn_predict_layers=1)
    check(folder)
    change_weights(folder, lambda tensors: tensors.update({"model.layers.5.eh_proj.weight": torch.ones(2)}))
    assert "of its config.json: model.layers.5.eh_proj.weight" in refusal(folder)


def sharded(folder: Path) -> Path:
    transformers.AutoModelForCausalLM.from_pretrained(folder).save_pretrained(folder, max_shard_size="200KB")
    (folder / "model.safetensors").unlink(missing_ok=True)
    assert len([*folder.glob("model-*.safetensors")]) > 2
    return folder


def test_a_missing_shard_a_cut_one_and_one_that_is_another_are_named(model: Path):
    first, second = sorted(sharded(model).glob("model-*.safetensors"))[:2]
    check(model)
    whole = first.read_bytes()
    for damaged in (whole[:-1], whole[:100], whole[:4], b"", b"\xff" * 200):
        first.write_bytes(damaged)
        assert f"{first.name} is not a complete safetensors file" in refusal(model)
    first.write_bytes(second.read_bytes())
    assert f"{first.name} lacks" in refusal(model)
    first.unlink()
    assert f"lacks 1 files that its model.safetensors.index.json names, the first is {first.name}" in refusal(model)


@pytest.mark.parametrize("index", ["{", "[]", "{}", '{"weight_map": 3}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none_is_named(model: Path, index: str):
    (model / "model.safetensors.index.json").write_text(index)
    assert "model.safetensors.index.json is not an index of tensors" in refusal(model)


def test_a_checkpoint_without_safetensors_is_refused(model: Path):
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"pickle")
    assert "has no .safetensors files" in refusal(model) and "save_pretrained" in refusal(model)


def test_what_a_checkpoint_needs_of_a_large_mixture_is_known_without_its_memory():
    config = transformers.Qwen3MoeConfig(
        hidden_size=2048, num_hidden_layers=48, num_experts=128, moe_intermediate_size=768, num_attention_heads=32,
        num_key_value_heads=4, head_dim=128, vocab_size=151936,
    )  # fmt: skip
    shapes = shapes_of(config)
    assert len(shapes) == 18867
    assert shapes["model.layers.47.mlp.experts.127.gate_proj.weight"] == (768, 2048)


# ---- tokenizer


@pytest.mark.parametrize(
    ("file", "content"),
    [(None, None), ("tokenizer.json", "{"), ("tokenizer.json", "{}"), ("tokenizer_config.json", "{")],
)
def test_a_tokenizer_that_is_missing_or_broken_is_one_sentence_with_its_files(model: Path, file: str, content: str):
    (model / (file or "tokenizer.json")).unlink()
    if file is not None:
        (model / file).write_text(content)
    with pytest.raises(ValueError) as caught:
        load_tokenizer(str(model), KEY, False)
    assert "tokenizer.json" in str(caught.value) and "\n" not in str(caught.value)
    assert str(caught.value).endswith("Copy the tokenizer's files from the source of the model")


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused_and_one_with_fewer_is_not():
    tokenizer = tiny_tokenizer()
    check_tokenizer(tokenizer, 64, "a")
    check_tokenizer(tokenizer, 1000, "a")
    tokenizer.add_tokens(["<new>", "<newer>"])
    with pytest.raises(ValueError, match="2 tokens beyond the vocabulary of 64 of a: the last is '<newer>' with id 65"):
        check_tokenizer(tokenizer, 64, "a")


def test_a_teacher_must_have_every_token_of_the_policy_under_its_id():
    policy, larger, other = tiny_tokenizer(), chatml_tokenizer(), tiny_tokenizer()
    check_same_tokens(policy, larger, "trainer.teacher.model.path", "larger")  # its own tokens are further ones
    missing = (
        r"path is other: its tokenizer differs .* in 2 tokens, .* '<\|im_end\|>': id 64 .*, missing in the teacher's"
    )
    with pytest.raises(ValueError, match=missing):
        check_same_tokens(larger, other, "trainer.teacher.model.path", "other")
    other.add_tokens(["<|im_start|>", "<|im_end|>"])
    assert other.convert_tokens_to_ids("<|im_start|>") != larger.convert_tokens_to_ids("<|im_start|>")
    with pytest.raises(ValueError, match=r"differs from the policy's in 2 tokens, .* id 65 in the teacher's"):
        check_same_tokens(larger, other, "trainer.teacher.model.path", "other")


def test_the_tokenizer_of_every_teacher_is_checked(tmp_path: Path):
    policy, teacher = write_tiny_model(tmp_path / "policy"), write_tiny_model(tmp_path / "teacher", vocab_size=80)
    chatml_tokenizer().save_pretrained(teacher)
    sources = f"trainer.teacher.model.path_of_data_source={{math: {teacher}}}"
    trainer = load_config([f"trainer.policy.model.path={policy}", sources]).trainer
    check_scoring_models(trainer, tiny_tokenizer(), None)
    with pytest.raises(ValueError, match=r"path_of_data_source.math is .*teacher: its tokenizer differs"):
        check_scoring_models(trainer, other_tokenizer(), None)


def test_a_teacher_that_engines_cannot_compute_is_refused(tmp_path: Path):
    teacher = write_tiny_model(tmp_path / "teacher")
    file = teacher / "config.json"
    given = [
        "trainer.teacher.backend=engine",
        f"trainer.teacher.model.path={teacher}",
        "trainer.policy.model.path=policy",
    ]
    trainer = load_config(given).trainer
    check_scoring_models(trainer, tiny_tokenizer(), "cpu")
    file.write_text(json.dumps(json.loads(file.read_text()) | {"head_dim": 48}))
    check_scoring_models(trainer, tiny_tokenizer(), "cuda")
    with pytest.raises(ValueError, match=r"trainer.teacher.model.path is .*teacher: its attention heads have size 48"):
        check_scoring_models(trainer, tiny_tokenizer(), "cpu")
    split = load_config([*given, "trainer.teacher.inference_engine_tensor_parallel_size=3"]).trainer
    with pytest.raises(ValueError, match=r"inference_engine_tensor_parallel_size is 3: it must divide the model's 4"):
        check_scoring_models(split, tiny_tokenizer(), "cuda")


@pytest.mark.parametrize(
    ("kwargs", "expected"),
    [
        ("layernorm_epsilon: 1.0", "layernorm_epsilon is 1.0: the config.json of {} has rms_norm_eps 1e-06, by which"),
        ("kv_channels: 8", "kv_channels is 8: the config.json of {} has head_dim "),
        ("rotary_base: 7", "rotary_base is 7: the config.json of {} has rope_theta 1"),
        ("moe_router_topk: 2", "moe_router_topk is 2: the config.json of {} has no num_experts_per_tok"),
        ("layernorm_epsilon: 1e-06, num_layers: 2, num_moe_experts: null, bias_activation_fusion: false", None),
        ("fp8: e4m3", None),
    ],
)
def test_megatron_gets_no_other_values_than_those_of_the_models_config(
    kwargs: str, expected: str | None, tmp_path: Path
):
    folder = str(write_tiny_model(tmp_path / "model"))
    config = load_config(
        [
            f"trainer.policy.model.path={folder}",
            "trainer.algorithm.use_kl_loss=true",
            f"trainer.ref.megatron_config.transformer_config_kwargs={{{kwargs}}}",
        ]
    )
    layout = "trainer.ref.megatron_config"
    if expected is None:
        check_transformer_config(config.trainer.ref.megatron_config, layout, folder)
        check_scoring_models(config.trainer, tiny_tokenizer(), None)
        return
    start = re.escape(f"{layout}.transformer_config_kwargs.{expected.format(folder)}")
    with pytest.raises(ConfigError, match=rf"^{start}.* Remove it$"):
        check_transformer_config(config.trainer.ref.megatron_config, layout, folder)
    with pytest.raises(ConfigError, match=start):
        check_scoring_models(config.trainer, tiny_tokenizer(), None)


def other_tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny_tokenizer()
    tokenizer.add_tokens(["new"])
    return tokenizer


def test_a_critic_may_have_a_value_head_and_no_head_of_a_language_model(model: Path):
    def to_critic(tensors: dict[str, torch.Tensor]) -> None:
        size = tensors.pop("lm_head.weight").shape[1]
        tensors["value_head.weight"] = torch.zeros(1, size)

    change_weights(model, to_critic)
    config = transformers.AutoConfig.from_pretrained(model)
    check_weights(config, "trainer.critic.model.path", str(model), str(model), "value_head")
    with pytest.raises(
        ValueError, match="1 tensors are not part of the .* model of its config.json: value_head.weight"
    ):
        check_weights(config, "trainer.critic.model.path", str(model), str(model), "score")
    assert "1 tensors of its config.json are missing: lm_head.weight" in refusal(model)
