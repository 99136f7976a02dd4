"""The smallest real tokenizer and model folder, for tests."""

from __future__ import annotations

from pathlib import Path

from transformers import PreTrainedTokenizerFast, set_seed

from skyrl_train.tasks.tiny import BOS, EOS, PAD, UNK, VOCABULARY, model_config, tokenizer

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token per character, 64 of them; its chat template joins the contents."""
    return tokenizer()


def chatml_tokenizer() -> PreTrainedTokenizerFast:
    """The same characters with `<|im_end|>` (64, the end of sequence) and `<|im_start|>` (65) and a ChatML template."""
    chatml = tokenizer()
    chatml.add_special_tokens({"additional_special_tokens": ["<|im_start|>"], "eos_token": "<|im_end|>"})
    chatml.chat_template = CHATML
    return chatml


def write_tiny_model(folder: Path, seed: int = 0, **changes: object) -> Path:
    """Writes a random Qwen3 of 0.3 million parameters with its tokenizer as a Hugging Face folder; returns the folder.

    `changes` go to the config (`tie_word_embeddings=False`, `num_hidden_layers=4`, ...).
    """
    from transformers import Qwen3Config, Qwen3ForCausalLM

    set_seed(seed)
    config = Qwen3Config(**{**model_config().to_dict(), "layer_types": None, **changes})
    Qwen3ForCausalLM(config).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


__all__ = ["BOS", "EOS", "PAD", "UNK", "VOCABULARY", "chatml_tokenizer", "tiny_tokenizer", "write_tiny_model"]
