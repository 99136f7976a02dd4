"""Where a run stands between two steps, and the folders with which another process goes on from there.

`CKPT_PATH/global_step_N` holds a file of each policy rank (megatron/state.py) and checkpoint.json, which is written
last: a folder without it is no checkpoint. On several nodes CKPT_PATH must be one folder for all of them.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from skyrl_train.config.training import TrainingConfig
from skyrl_train.data.order import OrderState
from skyrl_train.ranks import SavedState

RECORD = "checkpoint.json"
FORMAT = 1


@dataclass(frozen=True, slots=True)
class RunState:
    """A run after a whole step."""

    global_step: int
    policy_version: int
    """Optimizer steps in the weights."""
    order: OrderState
    layout: dict[str, int | None]
    """`layout_of` the policy, whose files these are."""
    saved_unix_s: float


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A whole checkpoint."""

    folder: Path
    state: RunState

    @property
    def saved(self) -> SavedState:
        """For the ranks."""
        return SavedState(str(self.folder), self.state.policy_version)


def layout_of(trainer: TrainingConfig) -> dict[str, int | None]:
    """What must be the same when the state of a rank is read as when it was written."""
    layout, place = trainer.policy.megatron_config, trainer.placement
    return {
        "policy ranks": place.policy_num_nodes * place.policy_num_gpus_per_node,
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline_model_parallel_size,
        "context_parallel_size": layout.context_parallel_size,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
    }


def load_checkpoint(folder: Path) -> Checkpoint:
    """Raises: ValueError if there is no checkpoint in the folder, or one of another format."""
    try:
        record: dict[str, Any] = json.loads((folder / RECORD).read_text())
    except FileNotFoundError:
        raise ValueError(f"{folder} is no whole checkpoint: it has no {RECORD}") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"{folder / RECORD} cannot be read: {error}") from None
    if record.pop("format", None) != FORMAT:
        raise ValueError(f"{folder} is a checkpoint of another version of skyrl_train; this one reads format {FORMAT}")
    return Checkpoint(folder, RunState(**record | {"order": OrderState(**record["order"])}))


class Checkpoints:
    """The checkpoints of one run in their folder."""

    def __init__(self, path: str, max_to_keep: int) -> None:
        """Args: max_to_keep: -1 means all."""
        self.path = Path(path).expanduser().resolve()
        self._max_to_keep = max_to_keep

    def all(self) -> list[Checkpoint]:
        """The whole ones, in the order in which they were written.

        Raises: ValueError as `load_checkpoint`.
        """
        found = [load_checkpoint(folder) for folder in self._folders() if (folder / RECORD).exists()]
        return sorted(found, key=lambda one: one.state.saved_unix_s)

    def _readable(self) -> list[Checkpoint]:
        """As `all`, without those that it would raise for."""
        found = []
        for folder in self._folders():
            with contextlib.suppress(ValueError):
                found.append(load_checkpoint(folder))
        return sorted(found, key=lambda one: one.state.saved_unix_s)

    def folder(self, global_step: int) -> Path:
        return self.path / f"global_step_{global_step}"

    def begin(self, folder: Path) -> None:
        """Make it an empty place for the files of the ranks. Raises: OSError."""
        _remove(folder)
        folder.mkdir(parents=True, exist_ok=True)

    def finish(self, folder: Path, state: RunState) -> None:
        """Make it a checkpoint, and let go of those that are too many and of what broke off.

        Raises: OSError, also if a rank wrote its file where this process does not see it.
        """
        ranks = range(state.layout["policy ranks"] or 0)
        if missing := [rank for rank in ranks if not (folder / f"rank_{rank}.pt").exists()]:
            raise OSError(
                f"the files of ranks {missing} are not in {folder} here: trainer.ckpt_path must be one for all nodes"
            )
        draft = folder / f".{RECORD}.draft"
        draft.write_text(json.dumps({"format": FORMAT, **asdict(state)}, indent=2) + "\n")
        draft.replace(folder / RECORD)
        broken = [other for other in self._folders() if not (other / RECORD).exists()]
        too_many = [] if self._max_to_keep < 0 else self._readable()[: -self._max_to_keep]
        for other in (*broken, *(one.folder for one in too_many)):
            _remove(other)

    def discard(self, folder: Path) -> None:
        """Remove what was written of a checkpoint that will not become whole."""
        with contextlib.suppress(OSError):
            _remove(folder)

    def _folders(self) -> list[Path]:
        return [path for path in self.path.glob("global_step_*") if path.is_dir()]


def _remove(folder: Path) -> None:
    """Remove what a checkpoint consists of, the record first, and the folder if nothing else is in it."""
    if not folder.exists():
        return
    (folder / RECORD).unlink(missing_ok=True)
    for file in (*folder.glob("rank_*.pt"), *folder.glob("rank_*.tmp"), folder / f".{RECORD}.draft"):
        file.unlink(missing_ok=True)
    if not any(folder.iterdir()):
        folder.rmdir()
