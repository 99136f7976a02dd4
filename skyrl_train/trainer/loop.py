"""The training loop of reinforcement learning and fine-tuning: steps, evaluations, exports, checkpoints."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

from skyrl_train.cancellation import in_thread
from skyrl_train.cluster.calls import RemoteFailed
from skyrl_train.cluster.ranks.model_group import ModelGroup
from skyrl_train.cluster.ranks.policy_group import PolicyGroup
from skyrl_train.config.training import TrainingConfig
from skyrl_train.hf.checkpoint import export_sum
from skyrl_train.rollout.source import Resumable, resume_source, snapshot_of, state_of
from skyrl_train.tracking.run_dir import HeldFolder
from skyrl_train.tracking.sinks import Tracker
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.from_config import model_of, settings_of
from skyrl_train.trainer.problems import Anomalies, Problems, SkippedUpdates, require_idle
from skyrl_train.trainer.residency import Residency
from skyrl_train.trainer.run_state import CRITIC, RECORD, Checkpoint, Checkpoints, RunState, write_groups
from skyrl_train.trainer.scorers import Critic
from skyrl_train.types import Metrics

log = logging.getLogger(__name__)


class Loop(ABC):
    """Runs `num_steps` steps. Subclasses define `step` and `evaluate`."""

    def __init__(
        self,
        config: TrainingConfig,
        source: Resumable,
        policy: PolicyGroup,
        tracker: Tracker,
        timers: Timers,
        num_steps: int,
    ) -> None:
        self._trainer_config, self._source, self._policy = config, source, policy
        self._tracker, self._timers, self._num_steps = tracker, timers, num_steps
        self._checkpoints = Checkpoints(config.ckpt_path, config.max_ckpts_to_keep)
        self._critic: Critic | None = None
        self._models: list[ModelGroup] = [policy]
        self._residency: Residency | None = None
        """Moves the models of reinforcement learning between phases."""
        self._stop_requested = False
        self.global_step = 0
        self.run_id = ""
        """Identifier in the run folder's run.json, stored in checkpoints."""
        self.base: dict[str, Any] = {}
        """Identity of the model on which the run began, and of frozen ones (hf/identity.py), stored in checkpoints."""
        self._pending = False
        """Whether an export or evaluation of the last step was skipped."""
        self._resumed: Checkpoint | None = None
        self._export_failed = False
        """Whether the export of the last step could not be written."""
        self._export_sum: str | None = None
        """`export_sum` of the last step's export."""
        self._saved_step = 0
        """Global step of the newest checkpoint, or of the one this run resumed from."""
        self.exported: Path | None = None
        self.run_folder: HeldFolder | None = None
        """The run's folder, which must not be moved or deleted."""
        self._problems, self._skipped, self._anomalies = Problems(), SkippedUpdates(), Anomalies()

    @abstractmethod
    async def step(self) -> Metrics:
        """Train on the next rows or groups; the metrics include `trainer/epoch` if there are epochs."""

    @abstractmethod
    async def evaluate(self) -> Metrics:
        """Metrics of the current model on held-out rows."""

    @property
    @abstractmethod
    def can_evaluate(self) -> bool:
        """Whether there are held-out rows."""

    async def evaluate_beside(self) -> bool:
        """Begin or skip the evaluation that is due, beside training; False if training has to wait for it."""
        return False

    def ended_evaluation(self) -> Metrics:
        """Metrics of an evaluation beside training that has ended. Raises: its error."""
        return {}

    async def undone(self, error: Exception) -> bool:
        """Whether weights and source are again those before the failed step. Args: error: of the step."""
        return False

    @property
    def is_evaluating(self) -> bool:
        """Whether an evaluation of the current weights runs beside training."""
        return False

    @property
    def coefficients(self) -> dict[str, float]:
        """Weights that controllers have changed, for checkpoints."""
        return {}

    def resume(self, checkpoint: Checkpoint) -> None:
        """Begin `train` with the step after this checkpoint, whose state the policy has loaded."""
        state = checkpoint.state
        resume_source(self._source, state.source, checkpoint.groups)
        self.global_step = self._saved_step = state.global_step
        self._skipped.resumed = state.policy_version > 0
        self._pending, self._resumed = state.pending, checkpoint

    def stop(self) -> None:
        """End the run after the current step."""
        self._stop_requested = True

    async def train(self) -> None:
        """Run all steps. Step 0 of the metrics is the model before training.
        Raises: RunIncomplete at the end of a run that was not stopped, if some of its work failed.
        """
        config = self._trainer_config
        if config.eval_before_train and self.can_evaluate and self.global_step == 0 and not self._stop_requested:
            self._tracker.log(0, await self._timed_evaluation() | {"trainer/epoch": 0.0})
        if self._pending:
            self._timers.reset()
            metrics = await self._export_and_evaluate()
            self._tracker.log(self.global_step, metrics | self._timers.metrics())
            if not (self._pending or self.is_evaluating):
                self._checkpoints.settle(self._resumed and self._resumed.state, self._export_sum)
        if self._resumed is not None and self.global_step < self._num_steps:
            self._checkpoints.continue_from(self._resumed.folder)
        while self.global_step < self._num_steps and not self._ends_early:
            self._timers.reset()
            with self._timers("step"):
                metrics = await self._step_or_checkpoint()
            self.global_step += 1
            self._skipped.count(self.global_step, metrics)
            self._anomalies.note(self.global_step, metrics)
            metrics |= await self._work_after_step(metrics)
            saves = config.ckpt_interval > 0 and self._is_due(config.ckpt_interval, also_last=True)
            finish = await self._write_checkpoint() if saves else None
            metrics |= self._timers.metrics() | {"perf/driver_share": self._timers.driver_share()}
            self._tracker.log(self.global_step, metrics)
            self._complete(finish)  # last: of a run that is killed before, another one repeats the step and logs it
            self._note_folders()
        if self._ends_early:
            await self._save_last()
        self._problems.note(self._checkpoints.newest_problem)
        self._problems.note(self._skipped.problem)
        if not self._stop_requested:
            self._problems.require_none()

    async def _step_or_checkpoint(self) -> Metrics:
        """A step. If it fails before its first optimizer step, the state after the last step is saved."""
        before = state_of(self._source) if self._trainer_config.ckpt_interval > 0 else {}
        try:
            return await self.step()
        except Exception as error:
            if not await self.undone(error):
                raise
            log.error("step %d ended before its first optimizer step: %s", self.global_step + 1, error)
            await self._save_if_possible(before)
            raise

    async def _work_after_step(self, metrics: Metrics) -> Metrics:
        """Exports and evaluations that are due. If one fails, the step is logged and saved; a resumed run does it."""
        try:
            return await self._export_and_evaluate()
        except Exception:
            self._pending = True
            self._tracker.log(self.global_step, metrics | self._timers.metrics())
            await self._save_if_possible()
            raise

    async def _save_if_possible(self, source: dict[str, Any] | None = None) -> None:
        try:
            await self._save_last(source)
        except Exception:
            log.exception("the checkpoint of step %d could not be written", self.global_step)

    async def _save_last(self, source: dict[str, Any] | None = None) -> None:
        """Write the checkpoint of the last step, unless there is one. Args: source: like `_write_checkpoint`."""
        if self._trainer_config.ckpt_interval < 0 or self._saved_step == self.global_step:
            return
        try:
            self._complete(await self._write_checkpoint(source))
        except RemoteFailed as error:  # what ended the run, such as a signal, may have stopped the processes too
            log.error("the checkpoint of step %d could not be written: %s", self.global_step, error)

    @property
    def newest_checkpoint(self) -> Path | None:
        """Folder of the newest complete checkpoint of this run, if it has one."""
        folder = self._checkpoints.folder(self._saved_step)
        return folder if (folder / RECORD).exists() else None

    @property
    def _ends_early(self) -> bool:
        return self._stop_requested or self._skipped.is_stuck

    def _note_folders(self) -> None:
        self._problems.note(self._checkpoints.problem)
        self._problems.note(None if self.run_folder is None else self.run_folder.problem)

    async def _export_and_evaluate(self) -> Metrics:
        """Do what is due after the step. Skipped after a stop request (a kill usually follows); done on resume."""
        self._pending, self._export_failed, self._export_sum = False, False, None
        config, metrics = self._trainer_config, self.ended_evaluation()
        due: list[Callable[[], Awaitable[Metrics]]] = []
        if self._is_due(config.hf_save_interval, also_last=config.hf_save_interval != 0):
            due.append(self._timed_export)
        is_due = self._is_due(config.eval_interval, also_last=True) and self.can_evaluate
        if is_due and (self._stop_requested or not await self.evaluate_beside()):
            due.append(self._timed_evaluation)
        for work in due:
            self._pending = self._stop_requested
            metrics |= {} if self._pending else await work()
        self._pending |= self._export_failed
        return metrics

    async def _timed_export(self) -> Metrics:
        """Write a Hugging Face checkpoint. A failed one is due again at the next interval, or when a checkpoint of this
        step is resumed; without the last one the run is incomplete.
        Raises: RemoteFailed if a rank is dead, or the weights cannot be loaded.
        """
        folder = Path(self._trainer_config.export_path).expanduser().resolve() / f"global_step_{self.global_step}"
        with self._timers("save_hf_model"):
            if self._residency is not None:
                await self._residency.for_saving()
            try:
                await self._policy.save_hf(str(folder))
                self.exported, self._export_sum = folder, export_sum(folder)
            except (OSError, RemoteFailed) as error:
                await require_idle(self._models, error, self._trainer_config.timeout_s)
                self._report_unwritten(f"the export of step {self.global_step}", error)
                self._export_failed = True
        return {"trainer/export_failed": float(self._export_failed)}

    async def _timed_evaluation(self) -> Metrics:
        with self._timers("eval"):
            return await self.evaluate()

    async def _write_checkpoint(self, source: dict[str, Any] | None = None) -> Callable[[], None] | None:
        """Write a checkpoint without its record, and return what writes that. A failed write (such as a full disk) is
        logged as an error, and the run continues.
        Args: source: state of the source, by default its present one; not for one that holds groups.
        Raises: RemoteFailed if a rank is dead, or the policy cannot be loaded.
        """
        config, step = self._trainer_config, self.global_step
        if self._skipped.is_all:
            log.warning("skipped the checkpoint of step %d: no update has changed the weights yet", step)
            return None
        self._note_folders()  # before deleted folders are created again for the checkpoint
        with self._timers("save_checkpoints"):
            if self._residency is not None:
                await self._residency.for_checkpoint()
            source, groups = snapshot_of(self._source, source)
            state = RunState(
                global_step=step,
                policy_version=self._policy.num_steps,
                pending=self._pending or self.is_evaluating,
                source=source,
                num_ranks=config.placement.num_policy_ranks,
                settings=settings_of(config),
                model=model_of(config) | self.base,
                run_id=self.run_id,
                critic_steps=None if self._critic is None else self._critic.group.num_steps,
                coefficients=self.coefficients,
                export=self._export_sum,
            )
            folder = self._checkpoints.folder(step)
            try:
                self._checkpoints.begin(folder)
                groups_sum = await in_thread(write_groups, folder, groups)
                sums, critic_sums = await self._policy.copy_state(str(folder)), []
                if self._critic is not None:
                    await self._critic.load()
                    critic_sums = await self._critic.group.copy_state(str(folder / CRITIC))
                return partial(self._checkpoints.finish, folder, state, sums, critic_sums, groups_sum)
            except (OSError, RemoteFailed) as error:
                await require_idle(self._models, error, self._trainer_config.timeout_s)
                self._discard(folder, error)
                return None

    def _complete(self, finish: Callable[[], None] | None) -> None:
        """Write the record of a checkpoint. Args: finish: from `_write_checkpoint`."""
        if finish is not None:
            try:
                finish()
                self._saved_step = self.global_step
            except OSError as error:
                self._discard(self._checkpoints.folder(self.global_step), error)

    def _discard(self, folder: Path, error: Exception) -> None:
        self._report_unwritten(f"the checkpoint of step {self.global_step}", error)
        self._checkpoints.discard(folder)

    def _report_unwritten(self, what: str, error: Exception) -> None:
        self._problems.unwritten(what, error, is_last=self.global_step >= self._num_steps, ends_early=self._ends_early)

    def _is_due(self, interval: int, *, also_last: bool) -> bool:
        step = self.global_step
        return (interval > 0 and step % interval == 0) or (also_last and step >= self._num_steps)
