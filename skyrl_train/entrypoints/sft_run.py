"""One run of supervised fine-tuning: policy ranks and no engines. Subclass it to change a part."""

from __future__ import annotations

import logging
from contextlib import ExitStack

from rich.console import Console

from skyrl_train.cluster.launch import PolicyProcesses, launch_policy
from skyrl_train.cluster.session import Cluster
from skyrl_train.config.sft import SftConfig
from skyrl_train.data.mapping import RowMapping
from skyrl_train.data.order import Order
from skyrl_train.data.sft import load_examples
from skyrl_train.entrypoints.run import Run
from skyrl_train.tracking.run_dir import RunDir
from skyrl_train.tracking.sinks import Tracker
from skyrl_train.tracking.timers import Timers
from skyrl_train.trainer.from_config import micro_batch_limits
from skyrl_train.trainer.sft import FineTuning, SftParts, SftTrainer, num_trained
from skyrl_train.types import Example

log = logging.getLogger(__name__)


class SftRun(Run[SftConfig, PolicyProcesses]):
    """A run of supervised fine-tuning. Users replace its parts by overriding `get_*`."""

    started_line = "policy is up"

    def __init__(self, config: SftConfig, console: Console) -> None:
        """Raises: ValueError for a bad row, a max_length beyond the model's positions, or a missing model."""
        super().__init__(config, console)
        positions = self.model_config.max_position_embeddings
        if config.data.max_length > positions:
            raise ValueError(
                f"data.max_length is {config.data.max_length}: more than the model's {positions} positions. Set it to "
                f"at most {positions}"
            )
        self.train_examples = self.get_train_examples()
        self.val_examples = self.get_val_examples()

    def get_train_examples(self) -> list[Example]:
        return self._load(self.config.data.train_data)

    def get_val_examples(self) -> list[Example]:
        return self._load(self.config.data.val_data) if self.config.data.val_data else []

    def _load(self, sources: tuple[str, ...]) -> list[Example]:
        data, names = self.config.data, ", ".join(sources)
        loaded = load_examples(
            sources,
            tokenizer=self.tokenizer,
            vocab_size=self.model_config.vocab_size,
            max_length=data.max_length,
            truncate=data.too_long == "truncate",
            assistant_turns=data.assistant_turns,
            chat_template_kwargs=data.chat_template_kwargs,
            mapping=RowMapping.of(data),
            timeout_s=self.config.trainer.download_timeout_s,
        )
        num_rows = len(loaded.examples) + loaded.num_dropped
        for num, verb in ((loaded.num_dropped, "dropped"), (loaded.num_truncated, "truncated")):
            if num:
                log.warning(
                    "%s: %s %d of %d rows with more than data.max_length=%d tokens",
                    names, verb, num, num_rows, data.max_length,
                )  # fmt: skip
        if not loaded.num_ended:
            log.warning(
                "%s: no row trains the end-of-sequence token %r, so the model will not learn where to stop. The chat "
                "template should write it after the assistant's text",
                names,
                self.tokenizer.eos_token,
            )
        return loaded.examples

    @property
    def num_train_rows(self) -> int:
        return len(self.train_examples)

    async def launch(self, cluster: Cluster, logs: str) -> PolicyProcesses:
        return await launch_policy(self.config.trainer, cluster, self.num_steps, logs, self.saved)

    def build_loop(
        self, processes: PolicyProcesses, run_dir: RunDir, tracker: Tracker, at_end: ExitStack
    ) -> SftTrainer:
        trainer, policy, timers = self.config.trainer, processes.policy, Timers()
        limits = micro_batch_limits(trainer, self.model_config, policy.dp_size)
        parts = SftParts(
            order=Order(self.train_examples, batch_size=trainer.train_batch_size, seed=trainer.seed),
            held_out=self.val_examples,
            tuning=FineTuning(policy, limits, timers),
            policy=policy,
            tracker=tracker,
            timers=timers,
        )
        return SftTrainer(self.config, parts, self.num_steps)

    def introduction(self, layout: str) -> dict[str, str]:
        tokens = sum(len(example.token_ids) for example in self.train_examples)
        trained = num_trained(self.train_examples)
        return {
            "model": f"{self.config.trainer.policy.model.path}, {layout}",
            "data": f"{len(self.train_examples)} rows of {tokens:,} tokens ({trained:,} trained), "
            f"{len(self.val_examples)} held out",
            "steps": f"{self.num_steps} of {self.config.trainer.train_batch_size} rows",
        }
