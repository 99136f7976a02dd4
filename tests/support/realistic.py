"""Tokenizers as large models have them: byte-level BPE, special tokens and a chat template of each family's form.

The vocabulary is trained on the reference that Python's `help()` prints, so nothing is downloaded. The templates in
`tests/data/templates` are written for these tests: each does to messages what its family's does.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parents[1] / "data" / "templates"
RESERVED = 32
"""Ids kept for special tokens, so that families share a trained vocabulary."""
# Contractions, words with the space before them, digits, punctuation, line ends, spaces; `{digits}` at a time.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{digits}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class Family:
    """Special tokens of a family's tokenizer."""

    eos: str
    """Ends a turn."""
    pad: str
    bos: str | None = None
    special: tuple[str, ...] = ()
    """Further tokens that decoding skips."""
    added: tuple[str, ...] = ()
    """Tokens that decoding keeps, such as tags of thoughts and tools."""
    digits: str = ""
    """How many digits a token has at most, as a repetition of the pattern; one by default."""


_TOOL_TAGS = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")


def _r1(name: str) -> str:
    """A token of DeepSeek: full-width bars, and U+2581 for spaces."""
    return f"<\uff5c{name.replace(' ', chr(0x2581))}\uff5c>"


_R1_TOOLS = [f"tool {kind}{part}" for kind in ("call", "output") for part in ("s begin", "s end", " begin", " end")]
FAMILIES = {
    "chatml": Family("<|im_end|>", "<pad>", special=("<|im_start|>",)),
    "qwen2_5": Family("<|im_end|>", "<|endoftext|>", special=("<|im_start|>",), added=_TOOL_TAGS[:2]),
    "qwen3": Family(
        "<|im_end|>", "<|endoftext|>", special=("<|im_start|>",), added=(*_TOOL_TAGS, "<think>", "</think>")
    ),
    "llama3": Family(
        "<|eot_id|>",
        "<|finetune_right_pad_id|>",
        "<|begin_of_text|>",
        special=("<|start_header_id|>", "<|end_header_id|>", "<|eom_id|>", "<|end_of_text|>", "<|python_tag|>"),
        digits="{1,3}",
    ),
    "deepseek_r1": Family(
        _r1("end of sentence"),
        _r1(" pad "),
        _r1("begin of sentence"),
        added=(*map(_r1, ("User", "Assistant", *_R1_TOOLS, "tool sep")), "<think>", "</think>"),
        digits="{1,3}",
    ),
    "gemma": Family("<end_of_turn>", "<pad>", "<bos>", special=("<start_of_turn>", "<eos>")),
}
"""Name of each file in `tests/data/templates` -> the tokens of its tokenizer."""


def realistic_tokenizer(family: str, vocab_size: int = 8000) -> PreTrainedTokenizerFast:
    """A new tokenizer of a family with its chat template.

    It has at most `vocab_size` tokens: `RESERVED` fewer of text, and then the family's special ones.
    """
    tokens = FAMILIES[family]
    named = {"eos_token": tokens.eos, "pad_token": tokens.pad} | ({"bos_token": tokens.bos} if tokens.bos else {})
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained(tokens.digits, vocab_size - RESERVED)),
        clean_up_tokenization_spaces=False,
        model_max_length=4096,
        chat_template=(TEMPLATES / f"{family}.jinja").read_text(),
    )
    tokenizer.add_special_tokens({**named, "additional_special_tokens": list(tokens.special)})
    tokenizer.add_tokens(list(tokens.added))
    return tokenizer


@cache
def _trained(digits: str, vocab_size: int) -> str:
    """A byte-level BPE without special tokens, as JSON; takes a second or two."""
    from pydoc_data.topics import topics

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS.replace("{digits}", digits)), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False)
    bpe.train_from_iterator((topics[name] for name in sorted(topics)), trainer)
    return bpe.to_str()
