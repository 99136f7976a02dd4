"""Two-digit addition, a tokenizer of 64 characters, and the shape of a model that can learn it, without downloads."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3Config

PAD, EOS, BOS, UNK = "<pad>", "<eos>", "<bos>", "<unk>"
VOCABULARY = (PAD, EOS, BOS, UNK, *"0123456789abcdefghijklmnopqrstuvwxyz +-*/=().,?:!<>\n_;'\"[]#%")
"""Token of each id; 64, so every id that a model can sample has a text."""
CHAT_TEMPLATE = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
"""Joins the contents: a prompt is exactly its characters."""
OPERANDS = range(100)
NUM_VALIDATION_ROWS = 500

Row = dict[str, Any]


def tokenizer() -> PreTrainedTokenizerFast:
    """A character-level tokenizer: one token per character, lower case only; other characters become `<unk>`."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    characters = Tokenizer(models.WordLevel({token: i for i, token in enumerate(VOCABULARY)}, unk_token=UNK))
    # Not a plain dot: it does not match newlines, so that two adjacent ones would become <unk>.
    characters.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), behavior="isolated")
    characters.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=characters,
        pad_token=PAD,
        eos_token=EOS,
        bos_token=BOS,
        unk_token=UNK,
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=512,
    )


def model_config(
    num_layers: int = 2,
    hidden_size: int = 128,
    intermediate_size: int = 256,
    num_heads: int = 4,
    initializer_range: float = 0.08,
) -> Qwen3Config:
    """A Qwen3 in float32 with 0.3 million parameters by default; two query heads share each key head.

    With the usual `initializer_range` of 0.02 such a narrow model starts to learn much later.
    """
    from transformers import Qwen3Config

    return Qwen3Config(
        vocab_size=len(VOCABULARY),
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_heads // 2,
        head_dim=32,
        max_position_embeddings=512,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        initializer_range=initializer_range,
        tie_word_embeddings=True,
        pad_token_id=VOCABULARY.index(PAD),
        bos_token_id=VOCABULARY.index(BOS),
        eos_token_id=VOCABULARY.index(EOS),
        dtype="float32",
    )


def untrained(seed: int, model: Qwen3Config) -> PreTrainedModel:
    import torch
    from transformers import Qwen3ForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Qwen3ForCausalLM(model)


def new_draft(folder: Path, chat_template: str = CHAT_TEMPLATE) -> Path:
    """A folder with the tokenizer, to be renamed to `folder` once it has the model."""
    draft = folder.with_name(f".{folder.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    written = tokenizer()
    written.chat_template = chat_template
    written.save_pretrained(draft)
    return draft


def addition_rows(seed: int) -> tuple[list[Row], list[Row]]:
    """All sums of two numbers below 100, written with two digits (`07+48=`), split by unordered pair.

    Returns: about 9,010 training rows in order of the operands, and 500 validation rows, each of another unordered
    pair; neither `a+b` nor `b+a` of a validation row is in training.
    """
    rng = random.Random(seed)
    held_out = rng.sample([(a, b) for a in OPERANDS for b in OPERANDS if a <= b], NUM_VALIDATION_ROWS)
    hidden = set(held_out)
    train = [(a, b) for a in OPERANDS for b in OPERANDS if (min(a, b), max(a, b)) not in hidden]
    validation = [(b, a) if rng.random() < 0.5 else (a, b) for a, b in held_out]
    return [sum_row(a, b, num_digits=2) for a, b in train], [sum_row(a, b, num_digits=2) for a, b in validation]


def sum_row(a: int, b: int, num_digits: int) -> Row:
    """A sum: the numbers have `num_digits` digits (`07+48=`), the answer has no leading zeros."""
    return {
        "data_source": "addition",
        "prompt": [{"role": "user", "content": f"{a:0{num_digits}d}+{b:0{num_digits}d}="}],
        "env_class": "addition",
        "reward_spec": {"method": "rule", "ground_truth": str(a + b)},
        "extra_info": {"a": a, "b": b},
    }


def write_rows(path: Path, rows: list[Row]) -> None:
    """Write rows as JSON lines; creates the folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
