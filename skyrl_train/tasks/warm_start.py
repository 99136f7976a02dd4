"""Warm start of a tiny model: supervised fine-tuning with transformers until it answers some questions when sampled."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from rich.console import Console

from skyrl_train.config import Config, ConfigError
from skyrl_train.config.sft import SftConfig
from skyrl_train.tasks import tiny as task

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedModel, Qwen3Config

BATCH_SIZE = 128
# A model warm-started at 1e-3 to the same accuracy learned far slower in GRPO (held-out 0.57 -> 0.58 in 10 steps, not
# 0.79).
LEARNING_RATE = 3e-3
STEPS_BETWEEN_CHECKS = 5
MAX_STEPS = 1500
TARGET_ACCURACY = 0.32

Answered = tuple[str, str]
"""Prompt and answer."""
Encoded: TypeAlias = "tuple[Tensor, Tensor]"
"""[L] tokens of prompt, answer and end of sequence, and which of them are not the prompt's."""


def write_missing(config: Config | SftConfig, files: Mapping[Path, list[task.Row]]) -> None:
    """Write the files that `config` names if they do not exist."""
    for path, rows in files.items():
        if str(path) in (*config.data.train_data, *config.data.val_data) and not path.exists():
            task.write_rows(path, rows)


def is_missing(config: Config | SftConfig, model: Path) -> bool:
    """Whether `config` names this model and it does not exist."""
    return Path(config.trainer.policy.model.path) == model and not model.exists()


def sums(rows: Sequence[task.Row]) -> list[Answered]:
    return [(row["prompt"][0]["content"], row["reward_spec"]["ground_truth"]) for row in rows]


def warm_start(
    folder: Path,
    seed: int,
    model: Qwen3Config,
    train: Sequence[Answered],
    held_out: Sequence[Answered],
    *,
    learning_rate: float = LEARNING_RATE,
    target: float = TARGET_ACCURACY,
    answers_per_prompt: int = 1,
    summary: str = "the model samples {:.0%} of the held-out sums right",
) -> None:
    """Train a new model on random batches until the fraction of samples that are an answer reaches the target.

    `folder` appears when it is complete. Args: summary: format string of that fraction for the console.
    Raises: ConfigError if the target is not reached.
    """
    import torch

    started = time.perf_counter()
    policy = task.untrained(seed, model)
    draft = task.new_draft(folder)
    threads, rng = torch.get_num_threads(), random.Random(seed)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=learning_rate, weight_decay=0.0)
    rows, validation = encoded(train), padded(encoded(held_out))
    torch.set_num_threads(1)  # faster for matrices of this size
    try:
        for step in range(1, MAX_STEPS + 1):
            tokens, is_answer = padded(rng.sample(rows, BATCH_SIZE))
            (-answer_logprobs(policy, tokens, is_answer).sum() / is_answer.sum()).backward()
            torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if step % STEPS_BETWEEN_CHECKS == 0:
                with torch.no_grad():
                    share = answers_per_prompt * float(answer_logprobs(policy, *validation).exp().mean())
                if share >= target:
                    break
        else:
            raise ConfigError([f"the warm start of {folder} did not reach {target} in {MAX_STEPS} steps"])
    finally:
        torch.set_num_threads(threads)
    policy.save_pretrained(draft)
    draft.rename(folder)
    seconds = time.perf_counter() - started
    Console().print(f"warm start: {step} SFT steps in {seconds:.0f} s; {summary.format(share)}", highlight=False)


def encoded(examples: Sequence[Answered]) -> list[Encoded]:
    import torch

    encode, end = task.tokenizer().encode, task.VOCABULARY.index(task.EOS)
    rows = []
    for prompt, answer in examples:
        asked, answered = encode(prompt), [*encode(answer), end]
        rows.append((torch.tensor(asked + answered), torch.tensor([0] * len(asked) + [1] * len(answered))))
    return rows


def padded(rows: Sequence[Encoded]) -> tuple[Tensor, Tensor]:
    """[B, L] both tensors of the rows, padded on the right."""
    from torch.nn.utils.rnn import pad_sequence

    tokens, is_answer = ([row[part] for row in rows] for part in (0, 1))
    return pad_sequence(tokens, batch_first=True), pad_sequence(is_answer, batch_first=True)


def answer_logprobs(policy: PreTrainedModel, tokens: Tensor, is_answer: Tensor) -> Tensor:
    """[B] logprob of each answer at temperature 1."""
    logprobs = policy(tokens[:, :-1]).logits.log_softmax(-1).gather(-1, tokens[:, 1:, None]).squeeze(-1)
    return (logprobs * is_answer[:, 1:]).sum(-1)
