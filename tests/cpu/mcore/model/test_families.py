"""Models that would not be computed as Hugging Face does are refused, in words."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from skyrl_train.hf.checkpoint import tensor_files
from skyrl_train.hf.transformer_config import OF_CONFIG, OF_FAMILY, PINNED, model_problems
from skyrl_train.megatron.model.bridge import build_bridge
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.verify.hf_reference import comparable, hugging_face
from skyrl_train.megatron.verify.layout_check import run_layout
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.verify.outcome import FLOAT32, compare
from skyrl_train.ranks import Rendezvous
from tests.support.families import FAMILIES, make_trial, write_family
from tests.support.layouts import layout


def test_a_checkpoint_with_weights_that_nobody_reads_is_refused(tmp_path: Path):
    write_family("qwen3_tied", tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["model.layers.1.self_attn.sinks"] = torch.zeros(4)
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(
        RuntimeError, match="weights that the qwen3 bridge does not read: model.layers.1.self_attn.sinks"
    ):
        run_layout(make_trial(tmp_path), layout(2, {"pp": 2}))


def _file_of_each_tensor(rendezvous: Rendezvous, folders: list[str]) -> list[dict[str, str]]:
    megatron = layout(1, {}).megatron
    join(rendezvous, megatron, 1)
    bridges = [build_bridge(folder, megatron, torch.float32, torch_layers=True) for folder in folders]
    readers = [bridge._get_safetensor_io(folder) for bridge, folder in zip(bridges, folders, strict=True)]
    return [reader.index for reader in readers]


def test_megatron_loads_each_tensor_from_the_file_that_is_checked(tmp_path: Path):
    """mbridge searches every file of a folder without an index; here one of each family's readers."""
    folders = [str(write_family(family, tmp_path / family)) for family in ("qwen3_tied", "deepseek_v3")]
    for folder in folders:
        save_file({"tok_embeddings.weight": torch.zeros(2)}, Path(folder, "consolidated.safetensors"))
    (read,) = run_on_ranks(_file_of_each_tensor, folders, 1, timeout_s=120)
    for folder, files in zip(folders, read, strict=True):
        assert files == {name: str(file) for name, file in tensor_files(folder).items()}
        assert set(files.values()) == {f"{folder}/model.safetensors"}


@pytest.mark.parametrize("block", [(128, 128), (16, 20)])
def test_fp8_weights_are_read_with_the_scales_of_their_blocks_by_verify_layout_too(
    block: tuple[int, int], tmp_path: Path
):
    plain = write_family("deepseek_v3", tmp_path / "plain")
    file = plain / "model.safetensors"
    shutil.copytree(plain, tmp_path / "fp8")
    tensors, quantised = load_file(file), {}
    for name in [name for name in tensors if name.endswith("proj.weight")]:
        weight = tensors[name]
        scales = torch.rand([-(-size // side) for size, side in zip(weight.shape, block, strict=True)]) + 0.5
        rows, columns = (torch.arange(size) // side for size, side in zip(weight.shape, block, strict=True))
        quantised |= {name: weight.to(torch.float8_e4m3fn), f"{name}_scale_inv": scales}
        tensors[name] = quantised[name].float() * scales[rows][:, columns]
    save_file(tensors, file, metadata={"format": "pt"})
    save_file(tensors | quantised, tmp_path / "fp8/model.safetensors", metadata={"format": "pt"})
    config = json.loads((plain / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "fp8", "weight_block_size": block}
    (tmp_path / "fp8/config.json").write_text(json.dumps(config))
    expected, read = (run_layout(make_trial(tmp_path / name), layout(1, {})) for name in ("plain", "fp8"))
    assert torch.equal(read.logprobs, expected.logprobs)
    reference = hugging_face(make_trial(tmp_path / "fp8"))
    assert not FLOAT32.exceeded(compare(comparable(read, reference), reference))


FREE = {
    *("attention_backend", "bf16", "disable_bf16_reduced_precision_matmul", "params_dtype", "pipeline_dtype"),
    *("masked_softmax_fusion", "bias_activation_fusion", "bias_dropout_fusion", "apply_rope_fusion"),
    *("gradient_accumulation_fusion", "persist_layer_norm", "use_cpu_initialization", "batch_p2p_sync"),
    *("moe_grouped_gemm", "moe_router_dtype", "moe_shared_expert_overlap", "moe_token_dispatcher_type"),
    *("moe_router_bias_update_rate", "mtp_loss_scaling_factor"),
}
"""Fields of precision, kernels and training."""


def _fields_of_families(rendezvous: Rendezvous, folders: list[str]) -> dict[str, tuple[set[str], list[str]]]:
    """Folder -> fields that the bridge passes to Megatron, and problems of giving it the same values."""
    megatron = layout(1, {}).megatron
    join(rendezvous, megatron, 1)
    given: set[str] = set()

    def recorded(build: Callable[..., None]) -> Callable[..., None]:
        return lambda self, **fields: (given.update(fields), build(self, **fields))[1]

    for kind in (TransformerConfig, MLATransformerConfig):  # of this process, which ends
        kind.__init__ = recorded(kind.__init__)  # type: ignore[method-assign]
    found = {}
    for folder in folders:
        given.clear()
        config = build_bridge(folder, megatron, torch.float32, torch_layers=True).config
        own = {name: value for name in given & OF_CONFIG.keys() if (value := getattr(config, name)) is not None}
        if config.multi_latent_attention:  # whose head sizes are other fields
            own.pop("kv_channels", None)
        problems = model_problems("kwargs", own, AutoConfig.from_pretrained(folder), folder)
        found[folder] = (set(given), list(problems))
    return found


def test_each_field_that_a_bridge_sets_is_free_or_that_of_the_model(tmp_path: Path):
    folders = [str(write_family(family, tmp_path / family)) for family in FAMILIES]
    (found,) = run_on_ranks(_fields_of_families, folders, 1, timeout_s=120)
    for given, problems in found.values():
        assert len(given & OF_CONFIG.keys()) >= 7 and not problems
        assert not given - FREE - PINNED.keys() - OF_FAMILY - OF_CONFIG.keys()


def test_other_fields_reach_megatron_and_replace_ours(tmp_path: Path):
    trial = make_trial(write_family("qwen3_tied", tmp_path))
    plain = run_layout(trial, layout(1, {}))
    changed = run_layout(trial, layout(1, {}, transformer_config_kwargs={"layernorm_epsilon": 1.0}))
    assert (plain.logprobs - changed.logprobs).abs().max() > 1e-2
