"""Steps of TRL's GRPOTrainer, timed, for benchmarks/trl.py. Knows no skyrl_train: TRL may have an
environment of its own.

    python trl_steps.py SETTINGS.json RESULT.json

What differs between machines (device, dtype, who generates) comes as `options` of GRPOConfig.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
import transformers
import trl
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class StepClock(TrainerCallback):
    """At the end of each step (and at the start of the first): the time, and the seconds of all generation before."""

    def __init__(self) -> None:
        self.times_s: list[float] = []
        self.generate_s: list[float] = []
        self.generated_s = 0.0

    def on_step_begin(self, *args: Any, **kwargs: Any) -> None:
        if not self.times_s:
            self._note()

    def on_step_end(self, *args: Any, **kwargs: Any) -> None:
        self._note()

    def _note(self) -> None:
        self.times_s.append(time.perf_counter())
        self.generate_s.append(self.generated_s)


class TimedTrainer(GRPOTrainer):
    """Tells its clock the seconds of generation; the rest of a step is scoring, forward, backward and optimizer."""

    clock: StepClock

    def _generate_single_turn(self, *args: Any, **kwargs: Any) -> Any:
        started = time.perf_counter()
        try:
            return super()._generate_single_turn(*args, **kwargs)
        finally:
            self.clock.generated_s += time.perf_counter() - started


def digit_share(completions: list[str], **kwargs: Any) -> list[float]:
    return [sum(character.isdigit() for character in text) / max(1, len(text)) for text in completions]


def main(settings: dict[str, Any]) -> dict[str, Any]:
    if settings["threads"] is not None:
        torch.set_num_threads(settings["threads"])
    samples = settings["prompts_per_step"] * settings["samples_per_prompt"]
    clock = StepClock()
    tokenizer = AutoTokenizer.from_pretrained(settings["model"])
    if tokenizer.eos_token is None:  # TRL needs one; its id is past the model's vocabulary, so no response ends early
        tokenizer.add_special_tokens({"eos_token": "<end>", "pad_token": "<end>"})
    trainer = TimedTrainer(
        model=settings["model"],
        processing_class=tokenizer,
        reward_funcs=digit_share,
        train_dataset=Dataset.from_list([{"prompt": prompt} for prompt in settings["prompts"]]),
        callbacks=[clock],
        args=GRPOConfig(
            output_dir=settings["folder"],
            max_steps=settings["steps"],
            per_device_train_batch_size=settings["micro_batch"],
            gradient_accumulation_steps=samples // settings["micro_batch"],
            num_generations=settings["samples_per_prompt"],
            max_completion_length=settings["max_new_tokens"],
            temperature=1.0,
            learning_rate=settings["lr"],
            weight_decay=0.0,
            max_grad_norm=1.0,
            beta=0.0,
            **settings["options"],
            dataloader_pin_memory=False,
            logging_steps=1,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
        ),
    )
    trainer.clock = clock
    trainer.train()
    lengths = [
        entry["completions/mean_length"] for entry in trainer.state.log_history if "completions/mean_length" in entry
    ]
    return {
        "steps_s": [end - start for start, end in itertools.pairwise(clock.times_s)],
        "generate_s": [end - start for start, end in itertools.pairwise(clock.generate_s)],
        "mean_tokens": lengths,
        "versions": {"trl": trl.__version__, "transformers": transformers.__version__, "torch": torch.__version__},
    }


if __name__ == "__main__":
    result = main(json.loads(Path(sys.argv[1]).read_text()))
    Path(sys.argv[2]).write_text(json.dumps(result))
