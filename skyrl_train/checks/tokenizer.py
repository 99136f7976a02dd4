"""The tokenizer of a model folder, and whether it fits the model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from transformers import AutoTokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

VOCABULARIES = (
    "tokenizer.json",
    "tokenizer.model",
    "vocab.json",
    "vocab.txt",
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
)
"""Files of which a tokenizer needs one. Without any, transformers 5 makes a tokenizer without tokens, silently."""
CURE = "Copy the tokenizer's files from where the model came from"


def load_tokenizer(folder: str) -> PreTrainedTokenizerBase:
    """Raises: ValueError that names the files if there is no tokenizer, or none that can be read."""
    if not any(Path(folder, name).is_file() for name in VOCABULARIES):
        raise ValueError(f"{folder} has no tokenizer, which is one of {', '.join(VOCABULARIES)}. {CURE}")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # whatever JSON, the tokenizers library and the tokenizer's class raise
        files = sorted(file.name for file in Path(folder).glob("*token*")) or list(VOCABULARIES[:1])
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"the tokenizer of {folder} ({', '.join(files)}) cannot be loaded: {type(error).__name__}: "
            f"{reason[:300]}. {CURE}"
        ) from error


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, model: str) -> None:
    """Raises: ValueError if the tokenizer has tokens that the model has no row for, or no tokens at all."""
    vocabulary = tokenizer.get_vocab()
    if not vocabulary:
        raise ValueError(f"the tokenizer of {model} has no tokens. {CURE}")
    last, token_id = max(vocabulary.items(), key=lambda item: item[1])
    if token_id >= vocab_size:
        raise ValueError(
            f"the tokenizer has {sum(number >= vocab_size for number in vocabulary.values())} tokens beyond the "
            f"vocabulary of {vocab_size} of {model}: the last is {last!r} with id {token_id}. {CURE}, or enlarge the "
            "model's embedding"
        )
