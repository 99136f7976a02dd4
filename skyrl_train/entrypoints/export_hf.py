"""Write the model of a checkpoint in Hugging Face's format, on the CPU:

    python -m skyrl_train.entrypoints.export_hf checkpoint=runs/NAME [export_path=FOLDER]

checkpoint: a folder global_step_N, or one that contains such folders (a run's folder, its checkpoints folder), of which
the newest intact one is exported. export_path: a new folder; by default exports/global_step_N in the run's folder.
No Ray and no GPU: the ranks are processes of this machine, which need memory for the model, not for its optimizer.
Exit code: 0 written, 1 it cannot be written, 2 the checkpoint or an argument cannot be used.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from skyrl_train.config.errors import ConfigError
from skyrl_train.config.policy import LoraConfig, MegatronConfig
from skyrl_train.config.schema import build
from skyrl_train.entrypoints.command import guarded, prints_help
from skyrl_train.entrypoints.ending import print_error
from skyrl_train.hf.checkpoint import INDEX
from skyrl_train.hf.download import download
from skyrl_train.hf.hub import address_problem, local_folder
from skyrl_train.hf.identity import change
from skyrl_train.tracking.run_dir import RECORD as RUN_RECORD
from skyrl_train.tracking.writable import require_writable
from skyrl_train.trainer.run_state import RECORD, Checkpoint, Checkpoints, load_checkpoint

if TYPE_CHECKING:
    from skyrl_train.megatron.export_saved import SavedPolicy

USAGE = "python -m skyrl_train.entrypoints.export_hf checkpoint=FOLDER [export_path=FOLDER]"
KEYS = ("checkpoint", "export_path")
DOWNLOAD_S = 6 * 3600.0
"""Timeout in seconds of the download of a hub model that is no longer in the cache."""


def main(argv: Sequence[str]) -> int:
    """Export what the command line asks for and return the exit code."""
    console = Console()
    if prints_help(argv, __doc__, console):
        return 0
    return guarded(lambda: _export(argv, console), console)


def _export(argv: Sequence[str], console: Console) -> int:
    arguments = _read(argv)
    try:
        checkpoint = find_checkpoint(arguments["checkpoint"])
        target = _target(arguments.get("export_path"), checkpoint)
        saved = saved_policy(checkpoint)
        if checkpoint.folder == Path(arguments["checkpoint"]).expanduser().resolve():  # else it was found intact
            _verify(checkpoint)
        download(f"the model of {checkpoint.folder}", saved.model_path, DOWNLOAD_S, "the limit of the download")
        if difference := change(checkpoint.state.model, local_folder(saved.model_path)):
            raise ValueError(
                f"{checkpoint.folder} cannot be exported: {saved.model_path} has changed since its run began: it "
                f"{difference}. Restore it"
            )
    except (ValueError, OSError) as error:
        raise ConfigError([str(error)]) from error
    import torch

    from skyrl_train.megatron.export_saved import export_saved

    torch.set_num_threads(1)  # the ranks are forked from this process
    console.print(f"exporting {checkpoint.folder} with {saved.num_ranks} process(es)", soft_wrap=True, highlight=False)
    try:
        export_saved(saved, str(target))
    except RuntimeError as error:
        print_error(_deletion(checkpoint) or f"{checkpoint.folder} could not be exported to {target}: {error}", console)
        return 1
    console.print(f"model   {target}", soft_wrap=True, highlight=False)
    return 0


def _read(argv: Sequence[str]) -> dict[str, str]:
    pairs = [argument.partition("=") for argument in argv]
    if unknown := [text for (key, equals, _), text in zip(pairs, argv, strict=True) if not equals or key not in KEYS]:
        raise ConfigError(f"{', '.join(unknown)}: the arguments are {', '.join(KEYS)}. Usage: {USAGE}")
    arguments = {key: value for key, _, value in pairs}
    if not arguments.get("checkpoint"):
        raise ConfigError(f"checkpoint is missing: nothing to export. Usage: {USAGE}")
    return arguments


def find_checkpoint(path: str, key: str = "checkpoint") -> Checkpoint:
    """The checkpoint in a folder, or the newest intact one in the folder of checkpoints or of a run.

    Raises: ValueError if there is none, or it is damaged.
    """
    folder = Path(path).expanduser().resolve()
    if (folder / RECORD).exists():
        return load_checkpoint(folder)
    for parent in (folder, folder / "checkpoints"):
        if (newest := Checkpoints(str(parent), -1).newest_intact()) is not None:
            return newest
    found = "is a file" if folder.exists() else "does not exist"
    what = "contains no checkpoint (global_step_N)" if folder.is_dir() else found
    raise ValueError(f"{key} is {folder}: it {what}. Name the folder of a checkpoint, or of a run that has one")


def _verify(checkpoint: Checkpoint) -> None:
    try:
        checkpoint.verify()
    except ValueError as error:
        raise ValueError(_deletion(checkpoint) or str(error)) from error


def _deletion(checkpoint: Checkpoint) -> str:
    """Sentence if the checkpoint was deleted since it was found; else empty."""
    if (checkpoint.folder / RECORD).exists():
        return ""
    return (
        f"{checkpoint.folder} was deleted while it was read: a run deletes all but its newest checkpoints "
        "(trainer.max_ckpts_to_keep). Name a newer one"
    )


def _target(path: str | None, checkpoint: Checkpoint) -> Path:
    run_dir, name = checkpoint.folder.parent.parent, checkpoint.folder.name
    if path is not None:
        if (problem := address_problem("export_path", path)) is not None:
            raise ValueError(problem)
        target = Path(path).expanduser().resolve()
    elif (run_dir / RUN_RECORD).exists():
        target = run_dir / "exports" / name
    else:
        raise ValueError(
            f"{checkpoint.folder} is not in the folder of a run. Name the folder to write: export_path=..."
        )
    if any(target.glob("*.safetensors")) or (target / INDEX).exists():
        raise ValueError(f"{target} already holds a model. Name another folder: export_path=...")
    if target.exists() and not target.is_dir():
        raise ValueError(f"export_path is {target}: that is a file. Name a folder")
    # A folder that does not exist yet gets its name when the export is complete.
    require_writable("export_path", str(target), target if target.is_dir() else target.parent, "Name another folder")
    return target


def saved_policy(checkpoint: Checkpoint) -> SavedPolicy:
    """The policy in a checkpoint."""
    from skyrl_train.megatron.export_saved import SavedPolicy

    state, model = checkpoint.state, checkpoint.state.model
    # A machine without a GPU has the torch layers only; their weights have the names of Transformer Engine's.
    megatron = replace(build(MegatronConfig, model["megatron_config"]), transformer_impl="torch")
    return SavedPolicy(
        folder=str(checkpoint.folder),
        num_ranks=state.num_ranks,
        num_steps=state.policy_version,
        model_path=model["path"],
        megatron=megatron,
        lora=build(LoraConfig, model["lora"]),
        bf16=model["bf16"],
        seed=model["seed"],
    )


if __name__ == "__main__":
    # Before torch looks: an export computes nothing, and a run may use the GPUs.
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    sys.exit(main(sys.argv[1:]))
