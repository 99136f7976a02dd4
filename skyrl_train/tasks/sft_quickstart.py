"""Data and model of `+experiment=sft_quickstart`: the quickstart's sums as conversations, and an untrained model."""

from __future__ import annotations

import shutil
from pathlib import Path

from skyrl_train.config.sft import SftConfig
from skyrl_train.tasks import quickstart
from skyrl_train.tasks import tiny as task

MODEL = Path("quickstart/sft_model")
TRAIN_DATA, VALIDATION_DATA = Path("quickstart/sft_train.jsonl"), Path("quickstart/sft_validation.jsonl")
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
"""The quickstart's, with an end-of-sequence token after the assistant's turns."""


def prepare(config: SftConfig) -> None:
    """Create the data and model that `config` names in the current folder if they do not exist."""
    train_rows, validation_rows = task.addition_rows(seed=0)
    files = {
        TRAIN_DATA: [conversation(row) for row in train_rows],
        VALIDATION_DATA: [conversation(row) for row in validation_rows],
    }
    quickstart.make_missing(config, files, MODEL, write_untrained)


def conversation(row: task.Row) -> task.Row:
    """A sum as question and answer."""
    return {"messages": [*row["prompt"], {"role": "assistant", "content": row["reward_spec"]["ground_truth"]}]}


def write_untrained(folder: Path, seed: int) -> None:
    """Create a Qwen3 of 0.3 million random parameters; `folder` appears when it is complete."""
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    quickstart.write_untrained(draft, seed, task.model_config(), CHAT_TEMPLATE)
    draft.rename(folder)
