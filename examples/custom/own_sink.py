"""A destination of metrics beside those of trainer.logger."""

from collections.abc import Mapping
from pathlib import Path

from skyrl_train.config.training import RunConfig


class FileSink:
    """Appends the metrics of each step to `metrics.csv` in the run's folder."""

    def __init__(self, run_dir: Path, config: RunConfig, steps_done: int) -> None:
        """Args: steps_done: 0, or the steps of a resumed run."""
        self.file = (run_dir / "metrics.csv").open("a")
        if steps_done == 0:
            self.file.write("step,name,value\n")

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        self.file.writelines(f"{step},{name},{value}\n" for name, value in metrics.items())
        self.file.flush()

    def close(self) -> None:
        self.file.close()
