"""Every field of a configuration is used, known to have no effect, or refused by its name and value."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from skyrl_train.checks.equivalence import config_and_problems
from skyrl_train.hf.ledger import LEDGERS, NO_EFFECT, ONLY, USED
from skyrl_train.hf.shrink import shrunk
from skyrl_train.megatron.model import families
from tests.support import released
from tests.support.families import EXPERTS, FAMILIES, SHAPE, YARN

WINDOW = "its attention has a sliding window, which is not built"


def write(name: str, folder: Path, **changes: Any) -> Path:
    kind, own = FAMILIES[name]
    getattr(transformers, f"{kind}Config")(**{**SHAPE, **own, **changes}).save_pretrained(folder)
    return folder


def problems(folder: Path, **added: Any) -> str:
    """Of the configuration in `folder`, with fields added to its file as they are."""
    file = folder / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | added))
    return "; ".join(config_and_problems(str(folder), "model")[1])


@pytest.mark.parametrize("name", FAMILIES)
def test_every_family_in_the_table_is_accepted(name: str, tmp_path: Path):
    assert problems(write(name, tmp_path)) == ""


def test_the_families_of_the_ledger_are_those_with_a_bridge():
    assert LEDGERS.keys() == families.FAMILIES.keys()


@pytest.mark.parametrize(
    ("name", "changes", "says"),
    [
        ("mistral", {"sliding_window": 64}, WINDOW),
        ("mixtral", {"sliding_window": 64}, WINDOW),
        ("mixtral", {"router_jitter_noise": 0.1}, "router_jitter_noise is 0.1"),
        ("mixtral", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1 with normalised weights"),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 2}, WINDOW),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 0}, WINDOW),
        ("qwen3_moe", {"use_sliding_window": True, "sliding_window": 64}, WINDOW),
        ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 64}, WINDOW),
        ("llama3_rope", {"attention_bias": True}, "attention_bias is True: its attention has biases"),
        ("llama3_rope", {"mlp_bias": True}, "mlp_bias is True: its MLP has biases"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ("qwen3", {"attention_dropout": 0.1}, "attention_dropout is 0.1"),
        ("deepseek_v3", {"norm_topk_prob": False}, "norm_topk_prob is False"),
        ("deepseek_v3", {"rope_interleave": False}, "rope_interleave is False"),
        ("deepseek_v3", {"n_group": 2, "topk_group": 2}, "num_experts_per_tok / topk_group"),
        ("deepseek_v3", {"num_experts_per_tok": 1}, "num_experts_per_tok is 1"),
        ("deepseek_v3", {"head_dim": 2}, "head_dim is 2: latent attention rotates qk_rope_head_dim 8"),
        ("glm4_moe", {"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0"),
        ("deepseek_v3", {"rope_parameters": YARN | {"truncate": False}}, "truncate are not built for latent"),
        ("deepseek_v3", {"rope_parameters": YARN | {"attention_factor": 1.5}}, "attention_factor"),
        ("deepseek_v3", {"rope_parameters": YARN | {"mscale": 0.7}}, "both or neither"),
        (
            "glm4_moe_lite",
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 2.0}},
            "rope_type is 'linear'",
        ),
        ("qwen3_moe", {"mlp_only_layers": [0]}, "mlp_only_layers is [0]"),
        ("qwen2_moe", {"decoder_sparse_step": 2}, "decoder_sparse_step is 2"),
        (
            "qwen3",
            {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
            "frequencies change with the length",
        ),
        (
            "llama3_rope",
            {
                "rope_parameters": {
                    "rope_type": "longrope",
                    "rope_theta": 1e4,
                    "factor": 4.0,
                    "short_factor": [1.0] * 8,
                    "long_factor": [2.0] * 8,
                    "original_max_position_embeddings": 64,
                }
            },
            "frequencies change with the length",
        ),
        ("qwen3", {"rope_parameters": YARN | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor is 0.5"),
    ],
)
def test_a_variant_that_would_be_computed_differently_is_refused(
    name: str, changes: dict[str, Any], says: str, tmp_path: Path
):
    assert says in problems(write(name, tmp_path, **changes))


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize(
    ("added", "says"),
    [
        ({"attention_sinks": 4}, "attention_sinks is 4: unknown field for this family"),
        ({"architectures": ["QwenForSequenceClassification"]}, "only models with a language-model head"),
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "quantization_config is"),
    ],
)
def test_a_field_that_is_not_known_is_refused_by_its_name(name: str, added: dict[str, Any], says: str, tmp_path: Path):
    assert says in problems(write(name, tmp_path), **added)


def test_fp8_weights_are_read_with_a_scale_per_block_alone(tmp_path: Path):
    folder = write("deepseek_v3", tmp_path)
    given = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert problems(folder, quantization_config=given) == ""
    for other in ({"weight_block_size": None}, {"weight_block_size": 128}, {"quant_method": "gptq"}):
        assert "use the unquantised checkpoint" in problems(folder, quantization_config=given | other)


def test_a_field_of_another_family_is_not_known(tmp_path: Path):
    assert "kv_lora_rank is 16" in problems(write("qwen3", tmp_path), kv_lora_rank=16)
    assert "moe_intermediate_size is 48" in problems(write("llama3_rope", tmp_path), **EXPERTS)


@pytest.mark.parametrize("name", FAMILIES)
def test_the_ledger_names_every_field_of_hugging_faces_class(name: str):
    kind, own = FAMILIES[name]
    config = getattr(transformers, f"{kind}Config")(**{**SHAPE, **own})
    ledger = LEDGERS[config.model_type]
    known = USED | NO_EFFECT | ONLY.keys() | ledger.used | ledger.only.keys() | {"architectures", "model_type"}
    assert not config.to_dict().keys() - known


READ_WITHOUT_EFFECT = {
    "initializer_range",
    "output_attentions",
    "output_hidden_states",
    "return_dict",
    "use_cache",
    "dtype",
    "bos_token_id",
    "eos_token_id",
    "problem_type",
    "id2label",
    "qk_head_dim",
    "max_window_layers",
    "transformers_version",
    "_name_or_path",
    "chunk_size_feed_forward",
    "label2id",
    "num_nextn_predict_layers",
    "pretraining_tp",
}
"""Fields of NO_EFFECT that Hugging Face's code reads on the way to logits: what it returns and starts from."""


@pytest.mark.parametrize("name", FAMILIES)
def test_what_hugging_face_reads_of_a_configuration_counts_as_used_or_has_its_value_checked(name: str):
    kind, own = FAMILIES[name]
    config = shrunk(getattr(transformers, f"{kind}Config")(**{**SHAPE, **own}))
    fields, read = set(config.to_dict()), set()

    class Recording(type(config)):  # type: ignore[misc]
        def __getattribute__(self, attribute: str) -> Any:
            read.add(attribute)
            return super().__getattribute__(attribute)

    model = transformers.AutoModelForCausalLM.from_config(config)
    for module in model.modules():
        if hasattr(module, "config"):
            module.config.__class__ = Recording
    model(torch.zeros(1, 4, dtype=torch.int64))
    config.__class__ = Recording
    type(model)(config)
    silent = read & fields & NO_EFFECT
    assert silent <= READ_WITHOUT_EFFECT
    assert {"hidden_size", "num_attention_heads"} <= read


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ({"model_type": "phi"}, "model_type is 'phi'. The families that can be trained are"),
        ({"model_type": "glm4"}, "model_type is 'glm4'. The families that can be trained are"),
        ({"model_type": "qwen3_mo"}, "(nearest: qwen3_moe)"),
        ({}, "model_type is None"),
        ({"model_type": "qwen3", "hidden_size": "wide"}, "transformers does not accept its config.json"),
        ({"model_type": ["qwen3"]}, "model_type is ['qwen3']"),
    ],
)
def test_a_configuration_that_cannot_be_read_is_refused(values: dict[str, Any], says: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError) as error:
        problems(tmp_path)
    assert says in str(error.value)


@pytest.mark.parametrize("name", released.CONFIGS)
def test_a_released_model_is_accepted_or_refused_with_its_reason(name: str, tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(released.CONFIGS[name]))
    try:
        said = problems(tmp_path)
    except ValueError as error:
        said = str(error)
    assert released.REFUSED.get(name, "") in said and bool(said) == (name in released.REFUSED)
