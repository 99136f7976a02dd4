"""Data and model of `+experiment=sft_quickstart`: the quickstart's sums as conversations, and an untrained model."""

from __future__ import annotations

from pathlib import Path

from skyrl_train.config.sft import SftConfig
from skyrl_train.tasks import tiny as task
from skyrl_train.tasks.warm_start import is_missing, write_missing

MODEL = Path("quickstart/sft_model")
TRAIN_DATA, VALIDATION_DATA = Path("quickstart/sft_train.jsonl"), Path("quickstart/sft_validation.jsonl")
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
"""The quickstart's, with an end-of-sequence token after the assistant's turns."""


def prepare(config: SftConfig) -> None:
    train, validation = task.addition_rows(seed=0)
    rows = {TRAIN_DATA: train, VALIDATION_DATA: validation}
    write_missing(config, {path: [conversation(row) for row in found] for path, found in rows.items()})
    if is_missing(config, MODEL):
        write_untrained(MODEL, config.trainer.seed)


def conversation(row: task.Row) -> task.Row:
    """A sum as question and answer."""
    return {"messages": [*row["prompt"], {"role": "assistant", "content": row["reward_spec"]["ground_truth"]}]}


def write_untrained(folder: Path, seed: int) -> None:
    """Create a Qwen3 of 0.3 million random parameters; `folder` appears when it is complete."""
    draft = task.new_draft(folder, CHAT_TEMPLATE)
    task.untrained(seed, task.model_config()).save_pretrained(draft)
    draft.rename(folder)
