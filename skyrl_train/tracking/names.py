"""Names of the timed phases, and the table of all metrics (`metrics.md`, a copy of which is in docs/tracking.md)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

TABLE = Path(__file__).with_name("metrics.md")


@dataclass(frozen=True, slots=True)
class Phase:
    name: str
    """Name of its metric, `timing/{phase}`."""
    label: str
    in_step: bool = True
    """Part of `timing/step`; evaluation and exports happen between steps."""
    by_driver: bool = False
    """Work of the driver, not of engines or ranks."""

    @property
    def key(self) -> str:
        """Name for `Timers`."""
        return self.name.removeprefix("timing/")


STEP = "trainer/global_step"
STEP_TIME = "timing/step"
PHASES = (
    Phase("timing/generate", "generate"),
    Phase("timing/wait_for_groups", "wait"),
    Phase("timing/convert_to_training_input", "prepare", by_driver=True),
    Phase("timing/fwd_logprobs_values_reward", "forward"),
    Phase("timing/critic_train", "critic"),
    Phase("timing/policy_train", "train"),
    Phase("timing/save_state", "state"),
    Phase("timing/sync_weights", "sync"),
    Phase("timing/sync_eval_engines", "eval sync", in_step=False),
    Phase("timing/eval", "evaluate", in_step=False),
    Phase("timing/save_hf_model", "save", in_step=False),
    Phase("timing/save_checkpoints", "checkpoint", in_step=False),
)
WITHIN_PHASES = (
    *("timing/generate_tail", "timing/offload", "timing/reload"),
    *("timing/engine_sleep", "timing/engine_wake"),
)


def phases_of(metrics: Mapping[str, float]) -> list[Phase]:
    """Phases timed in `metrics`: known ones in the order of the loop, then others by name."""
    known = {STEP_TIME, *WITHIN_PHASES, *(phase.name for phase in PHASES)}
    others = sorted(name for name in metrics if name.startswith("timing/") and name not in known)
    return [phase for phase in PHASES if phase.name in metrics] + [
        Phase(name, name.removeprefix("timing/").replace("_", " ")) for name in others
    ]


def metric_units() -> dict[str, str]:
    """Unit of every metric in the table; a name with `{...}` stands for a family of metrics."""
    rows = [line.strip("| ").split(" | ") for line in TABLE.read_text(encoding="utf-8").splitlines()[2:]]
    return {row[0].strip("`"): row[1].strip() for row in rows}
