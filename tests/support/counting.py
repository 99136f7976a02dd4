"""A training loop whose steps only count, and whose policy writes one small file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from skyrl_train.config.sft import load_sft_config
from skyrl_train.config.training import TrainingConfig
from skyrl_train.data.order import Order
from skyrl_train.file_sum import FileSum, sum_of
from skyrl_train.tracking.sinks import Tracker
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.loop import Loop
from skyrl_train.trainer.run_state import Checkpoints
from skyrl_train.types import Metrics

NUM_ROWS = 10


def trainer_config(folder: Path, *overrides: str) -> TrainingConfig:
    return load_sft_config(
        [
            f"trainer.run_dir={folder}/run",
            "trainer.train_batch_size=2",
            "trainer.seed=3",
            "trainer.hf_save_interval=0",
            "trainer.max_ckpts_to_keep=-1",
            *overrides,
        ]
    ).trainer


def steps(trainer: TrainingConfig) -> list[int]:
    return [one.state.global_step for one in Checkpoints(trainer.ckpt_path, 1).all()]


class Policy:
    """Counts the steps that were done with it, and writes a file."""

    def __init__(self) -> None:
        self.num_steps = 0
        self.error: Exception | None = None
        self.answers = True
        self.export_errors: dict[int, Exception] = {}
        self.exported: list[str] = []

    async def save_hf(self, folder: str) -> None:
        if self.num_steps in self.export_errors:
            raise self.export_errors[self.num_steps]
        self.exported.append(Path(folder).name)

    async def copy_state(self, folder: str) -> list[FileSum]:
        Path(folder, "rank_0.tmp").write_text("half")
        if self.error is not None:
            raise self.error
        return [sum_of(Path(folder, "rank_0.tmp").rename(Path(folder, "rank_0.pt")))]

    async def is_idle(self, timeout_s: float) -> bool:
        assert timeout_s == 600, "the other ranks may be writing still"
        return self.answers


class Counting(Loop):
    """A step takes a batch of rows."""

    can_evaluate = True
    metrics: Metrics = {}  # noqa: RUF012

    def __init__(self, trainer: TrainingConfig, num_steps: int, stop_at: int | None = None) -> None:
        self.policy, self.batches, self.stop_at = Policy(), [], stop_at
        self.evaluated: list[int] = []
        self.after_step: Callable[[], object] | None = None
        self.order = Order(range(NUM_ROWS), batch_size=trainer.train_batch_size, seed=trainer.seed)
        super().__init__(trainer, self.order, self.policy, Tracker([]), Timers(), num_steps)  # type: ignore[arg-type]

    async def step(self) -> Metrics:
        self.batches.append(self.order.next_batch())
        self.policy.num_steps += 1
        if len(self.batches) == self.stop_at:
            self.stop()
        if self.after_step is not None:
            self.after_step()
        return dict(self.metrics)

    async def evaluate(self) -> Metrics:
        self.evaluated.append(self.global_step)
        return {}
