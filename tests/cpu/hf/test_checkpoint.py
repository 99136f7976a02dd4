"""Which files of a folder are the checkpoint, and what their headers tell."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from huggingface_hub.utils import filter_repo_objects
from safetensors.torch import load_file, save_file

from skyrl_train.hf import adapter, hub
from skyrl_train.hf.checkpoint import tensor_files, tensor_shapes
from skyrl_train.hf.fingerprint import fingerprint

HEAD = 16


def write_mistral(folder: Path, shards: str = "5GB") -> Path:
    config = transformers.MistralConfig(
        vocab_size=40,
        hidden_size=2 * HEAD,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD,
    )
    transformers.set_seed(0)
    transformers.MistralForCausalLM(config).save_pretrained(folder, max_shard_size=shards)
    return folder


def add_the_same_under_mistrals_names(folder: Path) -> None:
    """As in the repositories: layers without `model.`, `wq` and `w1` where the others have `q_proj` and `gate_proj`."""
    own = {"q_proj": "wq", "k_proj": "wk", "v_proj": "wv", "o_proj": "wo", "gate_proj": "w1", "down_proj": "w2"}
    own |= {"up_proj": "w3", "self_attn": "attention", "mlp": "feed_forward"}
    own |= {"lm_head": "output", "embed_tokens": "tok_embeddings"}
    tensors = {}
    for file in folder.glob("*.safetensors"):
        for name, tensor in load_file(file).items():
            for theirs, mistrals in own.items():
                name = name.replace(theirs, mistrals)
            tensors[name.removeprefix("model.")] = tensor
    save_file(tensors, folder / "consolidated.safetensors")


@pytest.mark.parametrize("shards", ["5GB", "20KB"], ids=["one file", "an index"])
def test_weights_that_a_repository_holds_twice_are_read_once(shards: str, tmp_path: Path):
    folder = write_mistral(tmp_path / "model", shards)
    assert (folder / "model.safetensors.index.json").is_file() == (shards == "20KB")
    files, shapes, mark = tensor_files(str(folder)), tensor_shapes(str(folder)), fingerprint(str(folder))
    modules = adapter.linear_shapes(str(folder))
    assert set(shapes) == set(transformers.AutoModelForCausalLM.from_pretrained(folder).state_dict())
    add_the_same_under_mistrals_names(folder)
    assert tensor_files(str(folder)) == files
    assert tensor_shapes(str(folder)) == shapes
    assert fingerprint(str(folder)) == mark
    assert adapter.linear_shapes(str(folder)) == modules and len(modules) == 14


def test_weights_that_a_repository_holds_twice_are_downloaded_once():
    repository = ["config.json", "model-00001-of-00002.safetensors", "consolidated.safetensors", "tokenizer.model"]
    taken = filter_repo_objects(repository, allow_patterns=hub.PATTERNS, ignore_patterns=hub.TWICE)
    assert list(taken) == [name for name in repository if not name.startswith("consolidated")]


def test_files_of_any_name_are_read_where_nothing_names_them(tmp_path: Path):
    save_file({"a": torch.zeros(2, 3)}, tmp_path / "first.safetensors")
    save_file({"b": torch.zeros(4)}, tmp_path / "second.safetensors")
    assert tensor_shapes(str(tmp_path)) == {"a": (2, 3), "b": (4,)}


def test_a_file_that_the_index_names_and_is_missing_is_reported(tmp_path: Path):
    folder = write_mistral(tmp_path / "model", "20KB")
    names = sorted(set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values()))
    shutil.move(folder / names[1], tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=rf"lacks 1 files that its model.safetensors.index.json names.*{names[1]}"):
        tensor_files(str(folder))


@pytest.mark.parametrize("other", ["a.safetensors", "z.safetensors"])
def test_a_tensor_in_two_files_without_an_index_is_refused(other: str, tmp_path: Path):
    """transformers reads model.safetensors; vLLM loads both files, and keeps the values of the last."""
    save_file({"weight": torch.zeros(2), "bias": torch.zeros(2)}, tmp_path / "model.safetensors")
    save_file({"weight": torch.ones(2), "scale": torch.ones(2)}, tmp_path / other)
    first, second = sorted(["model.safetensors", other])
    with pytest.raises(ValueError, match=f"has 1 tensors twice: weight is in {first} and in {second}.*Remove one"):
        tensor_files(str(tmp_path))


def test_weights_beside_an_index_that_names_others_are_refused(tmp_path: Path):
    """transformers reads model.safetensors, vLLM and Megatron the files of the index."""
    folder = write_mistral(tmp_path / "model", "20KB")
    save_file({"weight": torch.zeros(2)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"two sets of weights: model.safetensors, and.*Remove model.safetensors, or"):
        tensor_files(str(folder))


def test_a_shard_with_a_tensor_that_the_index_assigns_to_another_is_refused(tmp_path: Path):
    """Megatron reads that of the index, vLLM and transformers load both."""
    folder = write_mistral(tmp_path / "model", "20KB")
    weights = json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"]
    first, *_, last = sorted(set(weights.values()))
    name = next(name for name, file in weights.items() if file == first)
    held = load_file(folder / last)
    save_file({**held, name: torch.zeros_like(load_file(folder / first)[name])}, folder / last, {"format": "pt"})
    with pytest.raises(ValueError, match=rf"{last} holds other values of {name} than {first}, where .* that it is"):
        tensor_shapes(str(folder))
    for more in ({"unnamed": torch.zeros(1)}, {name: load_file(folder / first)[name]}):
        save_file({**held, **more}, folder / last, {"format": "pt"})
        assert tensor_shapes(str(folder)).keys() == weights.keys()


def test_an_index_may_name_the_only_file(tmp_path: Path):
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")
    index = {"metadata": {}, "weight_map": {"weight": "model.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert tensor_files(str(tmp_path)) == {"weight": tmp_path / "model.safetensors"}


def test_hidden_files_are_not_weights(tmp_path: Path):
    """macOS writes `._NAME` beside a file of some disks."""
    save_file({"weight": torch.zeros(2)}, tmp_path / "shard.safetensors")
    (tmp_path / "._shard.safetensors").write_bytes(b"attributes")
    assert tensor_files(str(tmp_path)) == {"weight": tmp_path / "shard.safetensors"}


def test_weights_without_permission_to_read_them_are_reported_as_such(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    save_file({"weight": torch.zeros(2)}, tmp_path / "model.safetensors")

    def refused(path: Path, mode: str = "r") -> None:  # root may read everything
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", refused)
    with pytest.raises(
        ValueError, match=r"model.safetensors cannot be read \(.*Permission denied.*Change its permissions"
    ):
        tensor_shapes(str(tmp_path))


def test_parts_without_an_index_are_refused_because_they_may_be_of_two_exports(tmp_path: Path):
    for number in (1, 2):
        save_file({f"weight{number}": torch.zeros(2)}, tmp_path / f"model-{number:05d}-of-00002.safetensors")
    with pytest.raises(
        ValueError, match=r"parts of a checkpoint \(model-0000.-of-00002.safetensors\) and no model.saf"
    ):
        tensor_files(str(tmp_path))
    for file in tmp_path.iterdir():
        file.rename(file.with_name(file.name.replace("of-00002", "of-00001")))
    assert set(tensor_files(str(tmp_path))) == {"weight1", "weight2"}
