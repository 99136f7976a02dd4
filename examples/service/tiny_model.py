"""Makes the model of the example: random weights, one token per character."""

from __future__ import annotations

from pathlib import Path

from skyrl_train.config import Config

CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['content'] }}"
    "{% if message['role'] == 'assistant' %}<eos>{% endif %}{% endfor %}"
)
"""Joins the contents; the end-of-sequence token follows what the assistant says."""


def prepare(config: Config) -> None:
    """Write the model to trainer.policy.model.path if nothing is there."""
    folder = Path(config.trainer.policy.model.path)
    if folder.exists():
        return
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    from skyrl_train.tasks import tiny as quickstart_task

    logging.disable_progress_bar()
    torch.manual_seed(config.trainer.seed)
    Qwen3ForCausalLM(quickstart_task.model_config()).save_pretrained(folder)
    tokenizer = quickstart_task.tokenizer()
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
