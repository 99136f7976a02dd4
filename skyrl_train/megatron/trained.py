"""A model that an objective trains, on one rank: optimizer steps, device memory and saved state."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from skyrl_train.algorithms.objective import Objective
from skyrl_train.config.policy import LoraConfig, MegatronConfig, OptimizerConfig
from skyrl_train.device import peak_flops, synchronize
from skyrl_train.file_sum import FileSum
from skyrl_train.hf.flops import model_cost
from skyrl_train.megatron.model.model import build_model, dtype_of
from skyrl_train.megatron.model.parallel import join
from skyrl_train.megatron.optimizer.optimizer import build_optimizer, learning_rate, set_learning_rate, step_if_finite
from skyrl_train.megatron.passes.metrics import PassMetrics, update_metrics
from skyrl_train.megatron.passes.packing import Packer
from skyrl_train.megatron.passes.profiling import Tracer, span
from skyrl_train.megatron.passes.step import forward_backward
from skyrl_train.megatron.residency.memory import DeviceMemory
from skyrl_train.megatron.residency.state import load_state, save_durable_state, save_state, state_file
from skyrl_train.ranks import OPTIMIZER, WEIGHTS, Moved, ParallelRanks, Rendezvous, UpdateReport
from skyrl_train.types import TrainBatch


class TrainedModel:
    """One rank of a trained model. Every method is called on all ranks at once, with the batch of the rank's shard."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        model_path: str,
        config: MegatronConfig,
        optimizer_config: OptimizerConfig,
        objective: Objective,
        *,
        bf16: bool,
        seed: int,
        num_optimizer_steps: int,
        lora: LoraConfig | None = None,
        value_head: str | None = None,
    ) -> None:
        """Args: lora: if its rank is above 0, adapters are trained instead of the model's weights; value_head: name of
        the head of a critic, None for a language model.
        """
        self.ranks = join(rendezvous, config, seed)
        self._tracer = Tracer(config.torch_profiler_config, objective.name, rendezvous.rank)
        self.num_steps = 0
        """Optimizer steps in the weights, including one that failed."""
        self._model_path, self._objective, self._optimizer_config = model_path, objective, optimizer_config
        self._num_optimizer_steps = num_optimizer_steps
        dtype = dtype_of(bf16)
        self.model = build_model(model_path, config, dtype, trainable=True, lora=lora, seed=seed, value_head=value_head)
        self._optimizer = build_optimizer(self.model, optimizer_config, on_host=config.optimizer_cpu_offload)
        self._memory = DeviceMemory(self.model.modules, self._optimizer)
        self._packer = Packer.of_layout(sequence_parallel=self.model.bridge.config.sequence_parallel)

    def _train(
        self,
        batch: TrainBatch,
        epochs: int,
        objective: Objective,
        signals: dict[str, Tensor],
        refuses: Callable[[PassMetrics], bool] = lambda first: False,
    ) -> UpdateReport | None:
        """Take one optimizer step per mini-batch and epoch.

        Args: signals: [T] each, by their names in TokenInputs; refuses(metrics of the first pass): whether to stop
            before any weight changes, on all ranks alike.
        Returns: None if the update was refused.
        """
        started = time.perf_counter()
        passes: list[PassMetrics] = []
        norms: list[float] = []
        lr, flops, cost = 0.0, 0.0, model_cost(self.model.bridge.hf_config)
        for mini_batch in batch.mini_batches * epochs:
            with span("pack"):
                micro_batches = [self._packer.pack(batch, samples, signals) for samples in mini_batch]
            for chunk in self.model.chunks:
                chunk.zero_grad_buffer()
            self._optimizer.zero_grad()
            is_first = not passes
            with span("forward_backward"):
                own = objective.after(len(passes))
                passes.append(forward_backward(self.model, micro_batches, own, with_entropy=is_first))
            if is_first and refuses(passes[0]):
                return None
            lr = learning_rate(self.num_steps, self._num_optimizer_steps, self._optimizer_config)
            set_learning_rate(self._optimizer, lr, self._optimizer_config.weight_decay)
            self._memory.settle()
            self.num_steps += 1  # first: a step that fails may have changed weights
            with span("optimizer"):
                norms.append(step_if_finite(self._optimizer))
            chosen = [sample for samples in mini_batch for sample in samples]
            flops += cost.train_flops(batch.cu_seqlens.diff()[chosen])
        metrics = update_metrics(passes, norms, lr, objective.name)
        synchronize()  # The optimizer's last step counts as part of the update.
        return UpdateReport(
            metrics=metrics,
            seconds=time.perf_counter() - started,
            busy_seconds=sum(done.busy_seconds for done in passes),
            schedule_seconds=sum(done.seconds for done in passes),
            train_flops=flops,
            peak_flops=peak_flops(),
        )

    def steps_begun(self) -> int:
        """Optimizer steps in the weights, including one that failed; answers once the device has finished its work."""
        synchronize()
        return self.num_steps

    def offload(self, *parts: str) -> Moved:
        """Free the device memory of "weights", "optimizer" (with the gradients), or all; see residency/memory.py.

        Methods that need an offloaded part raise.
        """
        return self._memory.offload(*parts)

    def reload(self, *parts: str) -> Moved:
        """Restore offloaded parts. The optimizer may be copied in the background until `update` needs it."""
        return self._memory.reload(*parts)

    def save_state(self, folder: str) -> None:
        """Write this rank's state, which `load_state` restores in another process of the same layout."""
        save_state(*self._state_to_save(folder))

    def copy_state(self, folder: str) -> FileSum:
        """Write this rank's state for a checkpoint: once this returns, the file survives a loss of power."""
        return save_durable_state(*self._state_to_save(folder))

    def _state_to_save(self, folder: str) -> tuple[Path, list[torch.nn.Module], Any, ParallelRanks, int]:
        self._memory.require("save_state", WEIGHTS, OPTIMIZER)
        self._memory.settle()
        file = state_file(folder, dist.get_rank())
        return file, self.model.modules, self._optimizer, self.ranks, self.num_steps

    def load_state(self, folder: str, num_steps: int) -> None:
        """Raises: ValueError for the file of another version, rank, layout or model."""
        self._memory.require("load_state", WEIGHTS, OPTIMIZER)
        self._memory.settle()
        file = state_file(folder, dist.get_rank())
        load_state(file, self.model.modules, self._optimizer, self.ranks, num_steps)
        self.num_steps = num_steps
        self._memory.forget_frozen()
