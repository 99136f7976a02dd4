"""A progress bar for the samples of a step: number of samples, tokens per second, mean reward."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from skyrl_train.tracking.format import compact, number

if TYPE_CHECKING:
    from skyrl_train.types import Sample


class ConsoleProgress:
    """Shows the bar during generation and removes it afterwards; silent without a terminal."""

    def __init__(
        self, console: Console | None = None, label: str = "generate", clock: Callable[[], float] = time.perf_counter
    ) -> None:
        self._console, self._label, self._clock = console or Console(), label, clock
        self._bar: Progress | None = None

    def start(self, total: int) -> None:
        self.stop()
        self._num_samples, self._num_tokens, self._reward_sum = 0, 0, 0.0
        self._start_s = self._clock()
        if self._console.is_terminal:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                MofNCompleteColumn(),
                TextColumn("{task.fields[status]}"),
                TimeElapsedColumn(),
                console=self._console,
                transient=True,
                refresh_per_second=4,
            )
            self._bar.add_task(self._label, total=total, status="")
            self._bar.start()

    def advance(self, samples: Sequence[Sample]) -> None:
        if self._bar is None:
            return
        self._num_samples += 1
        self._num_tokens += sum(int(sample.loss_mask.sum()) for sample in samples)
        self._reward_sum += sum(sample.reward for sample in samples)
        self._bar.update(self._bar.task_ids[0], advance=1, status=self.status())

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def status(self) -> str:
        """Tokens per second and mean reward since the start, e.g. `8,123 tok/s · reward 0.4219`."""
        elapsed_s = max(self._clock() - self._start_s, 1e-9)
        reward = self._reward_sum / max(self._num_samples, 1)
        return f"{compact(self._num_tokens / elapsed_s)} tok/s · reward {number(reward)}"
