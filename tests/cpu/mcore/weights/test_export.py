"""Weights leave Megatron as the Hugging Face checkpoint they came from, bit for bit, each name once."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import tokenizers
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor

from skyrl_train.config.policy import MegatronConfig
from skyrl_train.file_sum import FileSum
from skyrl_train.hf.checkpoint import SUMS
from skyrl_train.megatron.model.model import build_model
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.optimizer.optimizer import build_optimizer
from skyrl_train.megatron.verify.layout_check import OPTIMIZER
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.megatron.weights import all_stages
from skyrl_train.megatron.weights import save as save_module
from skyrl_train.megatron.weights.all_stages import specs_by_stage, to_every_stage
from skyrl_train.megatron.weights.export import export, export_specs
from skyrl_train.megatron.weights.save import copy_others, export_folder, require_tensors, save_hf, write_config
from skyrl_train.ranks import Rendezvous
from skyrl_train.weight_sync.bucket import ALIGNMENT, TensorSpec
from skyrl_train.weight_sync.control import WeightSyncError
from tests.support.checkpoints import tensors_of
from tests.support.families import FAMILIES, write_family
from tests.support.layouts import layout

CASES: dict[str, tuple[str, int, dict[str, Any]]] = {
    "tied, one process": ("qwen3_tied", 1, {}),
    "tied TP2": ("qwen3_tied", 2, {"tp": 2}),
    "tied PP2": ("qwen3_tied", 2, {"pp": 2}),
    "tied PP2 VPP2": ("qwen3_tied", 2, {"pp": 2, "vpp": 2}),
    "tied PP3": ("qwen3_tied", 3, {"pp": 3}),
    "tied PP4": ("llama3_rope_tied", 4, {"pp": 4}),
    "biases TP2 PP2": ("qwen2", 4, {"tp": 2, "pp": 2}),
    "experts EP2": ("qwen3_moe", 2, {"ep": 2}),
    "experts TP2 ETP1": ("mixtral", 2, {"tp": 2, "etp": 1}),
    "experts TP2 EP2": ("qwen2_moe", 4, {"tp": 2, "ep": 2}),
    "latent attention PP2 EP2": ("deepseek_v3", 4, {"pp": 2, "ep": 2}),
}
one_of_each = pytest.mark.parametrize(("family", "processes", "sizes"), CASES.values(), ids=CASES)


def _export(rendezvous: Rendezvous, arguments: tuple[str, MegatronConfig, str, torch.dtype]) -> dict[str, Any]:
    path, megatron, target, dtype = arguments
    ranks = join(rendezvous, megatron, seed=1)
    model = build_model(path, megatron, dtype, trainable=True)
    build_optimizer(model, OPTIMIZER)
    specs = [(spec.name, spec.dtype, tuple(spec.shape)) for spec in export_specs(model, dtype)]
    stream = [(name, tensor.clone()) for name, tensor in export(model, dtype)]
    stages = specs_by_stage(export_specs(model, dtype))
    spread = [(name, tensor.clone()) for name, tensor in to_every_stage(stages, export(model, dtype))]
    save_hf(model, path, target)
    return {
        "specs": specs,
        "stream": stream,
        "owner": ranks.owns_stage,
        "stage": ranks.pp_rank,
        "all specs": [(spec.name, spec.dtype, tuple(spec.shape)) for stage in stages for spec in stage],
        "spread": spread,
    }


def run(family: str, processes: int, sizes: dict[str, Any], folder: Path, dtype: torch.dtype) -> list[dict[str, Any]]:
    source = write_family(family, folder / "source")
    arguments = (str(source), layout(processes, sizes).megatron, str(folder / "saved"), dtype)
    return run_on_ranks(_export, arguments, processes, timeout_s=120)


@one_of_each
def test_every_weight_leaves_once_as_it_came(family: str, processes: int, sizes: dict[str, Any], tmp_path: Path):
    parts = run(family, processes, sizes, tmp_path, torch.float32)
    source = tensors_of(tmp_path / "source")
    streams = [part["stream"] for part in parts if part["owner"]]
    names = [name for stream in streams for name, _ in stream]
    assert sorted(names) == sorted(source)
    for name, tensor in (item for stream in streams for item in stream):
        assert torch.equal(tensor, source[name]), name
    for part in parts:
        assert part["specs"] == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in part["stream"]]

    # For receivers with one sender or beside each rank: all of it on every rank.
    for part in parts:
        assert [name for name, _ in part["spread"]] == names
        assert all(torch.equal(tensor, source[name]) for name, tensor in part["spread"])
        assert part["all specs"] == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in part["spread"]]

    saved = tensors_of(tmp_path / "saved")
    assert saved.keys() == source.keys()
    assert all(torch.equal(saved[name], source[name]) for name in source)
    index = json.loads((tmp_path / "saved/model.safetensors.index.json").read_text())
    assert sorted(index["weight_map"]) == sorted(source)
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in source.values())


def _save_in_files(rendezvous: Rendezvous, arguments: tuple[str, MegatronConfig, str, int | None]) -> list[str]:
    """The files that this rank wrote. Arguments: the last is a rank that sees another folder of the same name."""
    path, megatron, target, elsewhere = arguments
    if rendezvous.rank == elsewhere:
        exists = os.path.exists
        os.path.exists = lambda file: ".stage" not in str(file) and exists(file)
    join(rendezvous, megatron, seed=1)
    model = build_model(path, megatron, torch.float32, trainable=False)
    written, save_module.FILE_BYTES = [], 100_000
    save = safetensors.torch.save_file

    def noted(tensors: dict[str, Tensor], file: Path, **options: Any) -> None:
        written.append(file.name)
        save(tensors, file, **options)

    safetensors.torch.save_file = noted
    save_hf(model, path, target)
    return written


@pytest.mark.parametrize("elsewhere", [None, 3])
def test_ranks_that_see_the_folder_write_files_of_limited_size_side_by_side(elsewhere: int | None, tmp_path: Path):
    path = write_family("qwen3_moe", tmp_path / "source")
    arguments = str(path), layout(4, {"ep": 2, "pp": 2}).megatron, str(tmp_path / "saved"), elsewhere
    written = run_on_ranks(_save_in_files, arguments, 4, timeout_s=120)
    source, saved = tensors_of(path), tensors_of(tmp_path / "saved")
    assert saved.keys() == source.keys() and all(torch.equal(saved[name], source[name]) for name in source)
    files = sorted((tmp_path / "saved").glob("*.safetensors"))
    assert {file.stat().st_mode for file in files} == {(tmp_path / "saved/config.json").stat().st_mode}
    assert sorted(name for each in written for name in each) == [file.name for file in files]
    assert len(files) > 4 and [bool(each) for each in written] == [rank != elsewhere for rank in range(4)]
    assert {file.name for file in (tmp_path / "saved").iterdir() if file.name.startswith(".")} == set()
    sizes = [sum(tensor.nbytes for tensor in load_file(file).values()) for file in files]
    assert all(size <= 100_000 or len(load_file(file)) == 1 for size, file in zip(sizes, files, strict=True))
    names = [f"model-{number:05d}-of-{len(files):05d}.safetensors" for number in range(1, len(files) + 1)]
    assert [file.name for file in files] == names


def _gather_with_failures(rendezvous: Rendezvous, arguments: tuple[MegatronConfig, int]) -> list[tuple[list[str], str]]:
    """Gather the tensors of two stages, of which one fails after some: (names, error) of each."""
    megatron, all_stages.TOGETHER_BYTES = arguments
    stage = join(rendezvous, megatron, seed=1).pp_rank
    specs = [TensorSpec(f"{stage}.{number}", torch.float32, (2, number + 1)) for number in range(3)]

    def tensors(num_good: int) -> Iterator[tuple[str, Tensor]]:
        for spec in specs[:num_good]:
            yield spec.name, torch.full(spec.shape, float(stage + 1))
        raise WeightSyncError(f"stage {stage} cannot go on")

    ended, stages = [], specs_by_stage(specs)
    for failing, num_good in product((0, 1), (0, 2, 3)):
        good = ((spec.name, torch.full(spec.shape, float(stage + 1))) for spec in specs)
        names, error = [], ""
        try:
            for name, tensor in to_every_stage(stages, tensors(num_good) if stage == failing else good):
                names.append(name)
                source, number = map(int, name.split("."))
                assert tensor.shape == (2, number + 1)
                assert tensor.eq(source + 1).all() or (source == failing != stage and tensor.eq(0).all())
        except WeightSyncError as raised:
            error = str(raised)
        ended.append((names, error))
    return ended


@pytest.mark.parametrize("together", [ALIGNMENT, 2 * ALIGNMENT, 1 << 20], ids=["one", "two", "all"])
def test_ranks_are_not_left_in_a_collective_by_a_stage_that_cannot_export(together: int):
    """Over gloo each wait would last the 20 seconds that the group is given, over NCCL for ever."""
    found = run_on_ranks(_gather_with_failures, (layout(2, {"pp": 2}).megatron, together), 2, timeout_s=20)
    cases = list(product((0, 1), (0, 2, 3)))
    for stage, ended in enumerate(found):
        for (failing, num_good), (names, error) in zip(cases, ended, strict=True):
            assert error == (f"stage {stage} cannot go on" if stage == failing else "")
            own = [f"{stage}.{number}" for number in range(num_good if stage == failing else 3)]
            theirs = [f"{1 - stage}.{number}" for number in range(3)]
            assert sorted(names) == sorted(own + theirs)


def test_a_saved_checkpoint_is_the_same_model_for_transformers(tmp_path: Path):
    run("qwen3_moe", 2, {"ep": 2}, tmp_path, torch.float32)
    before, after = (
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype=torch.float32)
        for name in ("source", "saved")
    )
    tokens = torch.arange(20)[None]
    assert torch.equal(before(tokens).logits, after(tokens).logits)


def test_an_export_formats_the_prompts_of_tools_like_its_model(tmp_path: Path):
    source, target = tmp_path / "source", tmp_path / "saved"
    target.mkdir()
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"a": 0}, unk_token="a"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, unk_token="a")
    tokenizer.chat_template = {"default": "plain", "tool_use": "with tools"}
    tokenizer.save_pretrained(source)
    others = ("pytorch_model.bin.index.json", "consolidated.safetensors.index.json", "weights.bin")
    for name in (*others, "adapter_config.json"):
        (source / name).write_text("{}")
    copy_others(source, target)
    exported = transformers.AutoTokenizer.from_pretrained(target)
    assert exported.chat_template == tokenizer.chat_template
    assert exported.apply_chat_template([{"role": "user", "content": "a"}], tools=[{}], tokenize=False) == "with tools"
    names = {str(file.relative_to(target)) for file in target.rglob("*") if file.is_file()}
    assert not [name for name in names if "bin" in name or "index" in name or "adapter" in name]
    assert "additional_chat_templates/tool_use.jinja" in names


def test_a_model_trained_in_bfloat16_is_saved_in_it(tmp_path: Path):
    """In the form of its model, here that of transformers 4, which computes with its defaults where version 5 writes
    the rotary base.
    """
    file = write_family("qwen3_tied", tmp_path / "source") / "config.json"
    given = json.loads(file.read_text())
    given |= {"rope_theta": given.pop("rope_parameters")["rope_theta"], "torch_dtype": given.pop("dtype")}
    file.write_text(json.dumps(given))
    arguments = (str(file.parent), layout(2, {"tp": 2}).megatron, str(tmp_path / "saved"), torch.bfloat16)
    run_on_ranks(_export, arguments, 2, timeout_s=120)
    source, saved = tensors_of(tmp_path / "source"), tensors_of(tmp_path / "saved")
    assert all(torch.equal(saved[name], source[name].bfloat16()) for name in source)
    assert json.loads((tmp_path / "saved/config.json").read_text()) == given | {"torch_dtype": "bfloat16"}


@pytest.mark.parametrize("spelling", ["torch_dtype", "dtype", None])
def test_an_exports_configuration_has_the_spelling_of_its_model(spelling: str | None, tmp_path: Path):
    fields = {
        "model_type": "qwen3_moe",
        "rope_theta": 1000000.0,
        "rope_scaling": {"type": "linear", "factor": 2.0},
        "num_experts": 128,
        "rms_norm_eps": 1e-06,
        "temperature": 0.6,
        "eos_token_id": [151645, 151643],
        "author": "山田",
        "transformers_version": "4.43.1",
    }
    target = tmp_path / "saved"
    target.mkdir()
    quantised = {"quantization_config": {"quant_method": "fp8"}}
    given = fields | quantised | ({} if spelling is None else {spelling: "float32"})
    (tmp_path / "config.json").write_text(json.dumps(given))
    write_config(tmp_path, target, torch.bfloat16)
    assert json.loads((target / "config.json").read_text()) == fields | {spelling or "torch_dtype": "bfloat16"}
    assert transformers.AutoConfig.from_pretrained(target).dtype == torch.bfloat16


def test_the_routers_bias_stays_in_float32(tmp_path: Path):
    parts = run("deepseek_v3", 2, {"ep": 2}, tmp_path, torch.bfloat16)
    source = tensors_of(tmp_path / "source")
    stream = dict(parts[0]["stream"])
    biases = [name for name in source if name.endswith("e_score_correction_bias")]
    assert len(biases) == 3 and all(torch.equal(stream[name], source[name]) for name in biases)
    assert parts[0]["specs"] == [(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in stream.items()]


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_leaves_as_it_came(family: str, tmp_path: Path):
    parts = run(family, 2, {"pp": 2}, tmp_path, torch.float32)
    source = tensors_of(tmp_path / "source")
    stream = [item for part in parts if part["owner"] for item in part["stream"]]
    assert sorted(name for name, _ in stream) == sorted(source)
    assert all(torch.equal(tensor, source[name]) for name, tensor in stream)


def _save_where_it_cannot(rendezvous: Rendezvous, arguments: tuple[str, MegatronConfig, str]) -> list[str]:
    path, megatron, target = arguments
    join(rendezvous, megatron, seed=1)
    model = build_model(path, megatron, torch.float32, trainable=False)
    told = []
    for folder in ("/dev/null/saved", target):
        with pytest.raises(ValueError) as error:
            save_hf(model, path, folder)
        told.append(str(error.value))
    Path(target, "model-00002-of-00002.safetensors").rmdir() if rendezvous.rank == 1 else None
    save_hf(model, path, target)
    return told


def test_all_ranks_hear_of_one_that_cannot_write_and_the_next_export_works(tmp_path: Path):
    source, target = write_family("qwen3_tied", tmp_path / "source"), tmp_path / "saved"
    (target / "model-00002-of-00002.safetensors").mkdir(parents=True)  # in the way of the second stage's file
    arguments = (str(source), layout(2, {"pp": 2}).megatron, str(target))
    told = run_on_ranks(_save_where_it_cannot, arguments, 2, timeout_s=60)
    assert told[0] == told[1]
    assert told[0][0].startswith("the checkpoint cannot be written") and "/dev/null/saved" in told[0][0]
    assert "irectory" in told[0][1] and str(target) in told[0][1]
    assert tensors_of(target).keys() == tensors_of(tmp_path / "source").keys()


def _export_after_a_replacement(rendezvous: Rendezvous, arguments: tuple[str, MegatronConfig]) -> tuple[Tensor, Tensor]:
    path, megatron = arguments
    join(rendezvous, megatron, seed=1)
    model = build_model(path, megatron, torch.float32, trainable=False)
    before = dict(export(model, torch.float32))
    norm = model.modules[0].decoder.final_layernorm
    norm.weight = torch.nn.Parameter(norm.weight.detach() + 1)
    after = dict(export(model, torch.float32))
    assert all(torch.equal(after[name], before[name]) for name in before if name != "model.norm.weight")
    return before["model.norm.weight"], after["model.norm.weight"]


def test_a_parameter_in_the_place_of_another_is_what_is_exported(tmp_path: Path):
    """What is exported is found once and read each time."""
    arguments = (str(write_family("qwen3_tied", tmp_path)), layout(1, {}).megatron)
    ((before, after),) = run_on_ranks(_export_after_a_replacement, arguments, 1, timeout_s=60)
    assert torch.equal(after, before + 1)


def test_a_file_of_an_export_is_compared_with_the_tensors_bit_by_bit(tmp_path: Path):
    tensors = {"a": torch.tensor([1.0, float("nan"), -0.0]), "b": torch.arange(4), "c": torch.ones(())}
    save_file(tensors, file := tmp_path / "model.safetensors")
    require_tensors(file, tensors)
    for name, other in (
        ("a", tensors["a"] + 0.0),
        ("b", tensors["b"].int()),
        ("c", torch.ones(1)),
        ("d", torch.ones(1)),
    ):
        with pytest.raises(OSError, match=f"does not hold the {name} that was written"):
            require_tensors(file, tensors | {name: other})


def _save_whole_folders(rendezvous: Rendezvous, arguments: tuple[str, MegatronConfig, str, str]) -> list[str]:
    """A new folder, one that is there, then each of them where the second stage cannot write."""
    path, megatron, new, there = arguments
    join(rendezvous, megatron, seed=1)
    model = build_model(path, megatron, torch.float32, trainable=False)
    for folder in (new, there):
        with export_folder(folder) as (unfinished, sums):
            sums |= save_hf(model, path, unfinished)
            if rendezvous.rank == 0:  # which renames the folder, perhaps before another rank is here
                assert not Path(folder, "config.json").exists()
    told = []
    for folder in (f"{new}_again", there):
        with pytest.raises(ValueError) as error, export_folder(folder) as (unfinished, sums):
            in_the_way = Path(unfinished, "model-00002-of-00002.safetensors")
            in_the_way.mkdir(parents=True) if rendezvous.rank == 1 else None
            sums |= save_hf(model, path, unfinished)
        told.append(str(error.value))
    unseen = pytest.raises(ValueError, match="model-9.safetensors is missing. The folder of an export must be one")
    with unseen, export_folder(f"{new}_unseen") as (unfinished, sums):
        sums |= save_hf(model, path, unfinished) | {"model-9.safetensors": FileSum(1, "")}
    return told


def test_an_export_has_its_name_when_it_is_complete_and_lists_its_digests(tmp_path: Path):
    source, new, there = write_family("qwen3_tied", tmp_path / "source"), tmp_path / "new", tmp_path / "there"
    there.mkdir()
    (there / "notes.txt").write_text("mine")
    arguments = (str(source), layout(2, {"pp": 2}).megatron, str(new), str(there))
    told = run_on_ranks(_save_whole_folders, arguments, 2, timeout_s=60)
    assert all("cannot be written" in message for message in told[0])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "source", "there"], "no half folder is left"
    assert (there / "notes.txt").read_text() == "mine" and not (there / ".unfinished").exists()
    for folder in (new, there):
        assert tensors_of(folder).keys() == tensors_of(source).keys()
        listed = dict(reversed(line.split("  ")) for line in (folder / SUMS).read_text().splitlines())
        files = {path.name for path in folder.iterdir()} - {SUMS, "notes.txt"}
        assert listed == {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in files}


def test_weights_of_another_origin_are_never_mixed_with_an_export(tmp_path: Path):
    """Transformers reads model.safetensors before the index of an export beside it."""
    target, unfinished = tmp_path / "target", tmp_path / "target/.unfinished"
    unfinished.mkdir(parents=True)
    (target / "model.safetensors").write_text("old")
    (unfinished / "model-00001-of-00001.safetensors").write_text("new")
    with pytest.raises(OSError, match=r"weights of another origin \(model.safetensors\)"):
        save_module._publish(unfinished, target, {})
    (target / "model.safetensors").unlink()
    for text in ("new", "newer"):  # its own may be replaced
        unfinished.mkdir(exist_ok=True)
        (unfinished / "model-00001-of-00001.safetensors").write_text(text)
        save_module._publish(unfinished, target, {})
        assert (target / "model-00001-of-00001.safetensors").read_text() == text


def test_an_export_removes_the_files_of_an_earlier_one_that_it_does_not_have(tmp_path: Path, monkeypatch: Any):
    """Files that no export listed stay; an export that was killed half-way does not refuse the next one."""
    target, outside = tmp_path / "target", tmp_path / "outside.txt"
    shard, index, sums = "model-0000{}-of-0000{}.safetensors", "model.safetensors.index.json", "SHA256SUMS"

    def publish(*names: str) -> None:
        shutil.rmtree(target / ".unfinished", ignore_errors=True)
        for name in names:
            (file := target / ".unfinished" / name).parent.mkdir(parents=True, exist_ok=True)
            file.write_text(" ".join(names))
        save_module._publish(target / ".unfinished", target, {})

    def found() -> set[str]:
        return {str(path.relative_to(target)) for path in target.rglob("*")}

    two = (shard.format(1, 2), shard.format(2, 2), index, "chat_template.jinja", "adapter/a.safetensors")
    one = (shard.format(1, 1), index, "config.json")
    publish(*two)
    for file in (outside, target / "notes.txt"):
        file.write_text("mine")
    with (target / sums).open("a") as stream:
        stream.write(f"0  {outside}\n0  ../outside.txt\n")

    publish(*one)
    assert found() == {*one, sums, "notes.txt"} and outside.exists()
    for killed_at, expected in ((sums, one), (index, one), (shard.format(2, 2), two)):
        replace = Path.replace
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

            def killed(path: Path, other: Path, at: str = killed_at, replace: Any = replace) -> Path:
                if path.name == at and other.parent == target:
                    raise KeyboardInterrupt
                return replace(path, other)

            patch.setattr(Path, "replace", killed)
            publish(*two)
        assert not (target / index).exists(), "a reader finds no model"
        publish(*expected)
        assert found() - {"adapter"} == {*expected, sums, "notes.txt"}
        assert [line.split("  ")[1] for line in (target / sums).read_text().splitlines()] == sorted(expected)
