"""A checkpoint becomes the model that its run would have exported, without its run, its optimizer or a GPU."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.config import load_config
from skyrl_train.config.policy import SyncedLoraConfig
from skyrl_train.entrypoints import command, export_hf
from skyrl_train.file_sum import FileSum
from skyrl_train.hf.identity import identity
from skyrl_train.megatron.verify.layout_check import Layout, Trial
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from skyrl_train.trainer.from_config import model_of
from skyrl_train.trainer.run_state import Checkpoints, RunState
from tests.support.adapters import lora_config
from tests.support.checkpoints import tensors_of
from tests.support.families import make_trial, write_family
from tests.support.layouts import layout
from tests.support.policies import build


def _trained(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, str, str]) -> FileSum:
    """One update, exported by the run itself and saved for a checkpoint."""
    trial, one, exported, folder = arguments
    policy, batch = build(rendezvous, trial, one, bf16=True)
    policy.keep_old_logprobs(batch)
    policy.update(batch)
    policy.save_hf(exported)
    return policy.copy_state(folder)


def checkpoint_of(run_dir: Path, exported: Path, sizes: tuple[int, dict[str, Any]], lora: SyncedLoraConfig) -> Path:
    """The newest checkpoint of a run with this layout."""
    trial = make_trial(write_family("qwen3_tied", run_dir / "source"), [7, 30, 12, 9])
    trial = replace(trial, lora=lora if lora.rank else None)
    processes, one = sizes[0], layout(*sizes)
    checkpoints = Checkpoints(str(run_dir / "checkpoints"), -1)
    checkpoints.begin(folder := checkpoints.folder(1))
    arguments = (trial, one, str(exported), str(folder))
    sums = run_on_ranks(_trained, arguments, processes, timeout_s=120)
    trainer = load_config(["trainer.bf16=true", "trainer.seed=1"]).trainer
    model = replace(trainer.policy.model, path=trial.model_path, lora=lora)
    policy = replace(trainer.policy, model=model, megatron_config=one.megatron)
    kept = model_of(replace(trainer, policy=policy)) | identity(trial.model_path, has_frozen_weights=lora.rank > 0)
    state = RunState(1, 2, False, {}, processes, {}, "", model=kept)
    checkpoints.finish(folder, state, sums)
    return folder


@pytest.fixture(autouse=True)
def _own_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("COLUMNS", "500")
    monkeypatch.setattr(command.signal, "signal", lambda *arguments: None)


@pytest.mark.parametrize(
    ("sizes", "lora"),
    [((4, {"tp": 2, "pp": 2}), lora_config(rank=0)), ((2, {"pp": 2, "vpp": 2}), lora_config())],
    ids=["TP2 PP2", "adapters PP2 VPP2"],
)
def test_a_checkpoint_is_exported_with_the_bits_that_its_run_would_export(
    sizes: tuple[int, dict[str, Any]], lora: SyncedLoraConfig, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    run_dir, exported = tmp_path / "run", tmp_path / "exported"
    folder = checkpoint_of(run_dir, exported, sizes, lora)
    (run_dir / "run.json").write_text("{}")
    assert export_hf.main([f"checkpoint={run_dir}"]) == 0, capsys.readouterr().out
    target = run_dir / "exports/global_step_1"
    assert capsys.readouterr().out.splitlines()[-1] == f"model   {target}"
    mine, theirs, before = tensors_of(target), tensors_of(exported), tensors_of(run_dir / "source")
    assert mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert any(not torch.equal(mine[name].float(), before[name].bfloat16().float()) for name in mine)
    assert {path.name for path in target.rglob("*")} == {path.name for path in exported.rglob("*")}
    assert (target / "SHA256SUMS").read_bytes() == (exported / "SHA256SUMS").read_bytes()

    assert export_hf.main([f"checkpoint={folder}"]) == 2, "nothing is replaced"
    assert f"{target} already holds a model. Name another folder: export_path=" in capsys.readouterr().out

    config = run_dir / "source/config.json"
    config.write_text(config.read_text().replace('"rms_norm_eps": 1e-06', '"rms_norm_eps": 0.1'))
    assert export_hf.main([f"checkpoint={folder}", f"export_path={tmp_path}/other"]) == 2
    assert (
        "since its run began: it has another config.json (rms_norm_eps is 0.1, was 1e-06). Restore"
        in capsys.readouterr().out
    )


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["checkpiont=x"], "checkpiont=x: the arguments are checkpoint, export_path"),
        (["export_path=x"], "checkpoint is missing: nothing to export"),
        (["checkpoint=gone"], "gone: it does not exist. Name the folder of a checkpoint, or of a run that has one"),
        (["checkpoint=."], "it contains no checkpoint (global_step_N)"),
        (["checkpoint=alone"], "is not in the folder of a run. Name the folder to write: export_path=..."),
        (["checkpoint=alone", "export_path=file"], "file: that is a file. Name a folder"),
        (["checkpoint=alone", "export_path=file/in"], "file/in: nothing can be written there"),
    ],
    ids=lambda value: value[0] if isinstance(value, list) else "",
)
def test_what_cannot_be_exported_is_one_message(
    arguments: list[str],
    expected: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    checkpoints = Checkpoints("alone", -1)
    checkpoints.begin(folder := checkpoints.folder(1))
    checkpoints.finish(folder, RunState(1, 1, False, {}, 0, {}, "", {}), [])
    assert export_hf.main(arguments) == 2
    assert expected in capsys.readouterr().out
