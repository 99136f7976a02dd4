"""Makes what `+experiment=sft_quickstart` needs: an untrained tiny model and the quickstart's sums as conversations."""

from __future__ import annotations

import shutil
from pathlib import Path

from skyrl_train.config.sft import SftConfig
from skyrl_train.tasks import tiny as task

MODEL = Path("quickstart/sft_model")
TRAIN_DATA, VALIDATION_DATA = Path("quickstart/sft_train.jsonl"), Path("quickstart/sft_validation.jsonl")
CHAT_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] + eos_token }}{% endgeneration %}"
    "{% else %}{{ message['content'] }}{% endif %}{% endfor %}"
)
"""The quickstart's own, and the assistant's turns end with the end-of-sequence token. A prompt is the same in both."""


def prepare(config: SftConfig) -> None:
    """Make data and model of the quickstart in the current folder, where they are missing and still asked for."""
    train_rows, validation_rows = task.addition_rows(seed=0)
    for path, rows in ((TRAIN_DATA, train_rows), (VALIDATION_DATA, validation_rows)):
        if str(path) in (*config.data.train_data, *config.data.val_data) and not path.exists():
            task.write_rows(path, [conversation(row) for row in rows])
    if Path(config.trainer.policy.model.path) == MODEL and not MODEL.exists():
        write_untrained(MODEL, config.trainer.seed)


def conversation(row: task.Row) -> task.Row:
    """A sum as a question and its answer."""
    return {"messages": [*row["prompt"], {"role": "assistant", "content": row["reward_spec"]["ground_truth"]}]}


def write_untrained(folder: Path, seed: int) -> None:
    """A Qwen3 of 0.3 million random parameters. It appears at `folder` only when it is whole."""
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(seed)
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    Qwen3ForCausalLM(task.model_config()).save_pretrained(draft)
    tokenizer = task.tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(draft)
    draft.rename(folder)
