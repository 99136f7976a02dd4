"""The tokenizer of a model folder, and whether it matches the model."""

from __future__ import annotations

import contextlib
import json
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
"""Vocabulary files, one of which a tokenizer needs; without any, transformers 5 silently returns one without tokens."""
REMEDY = "Copy the tokenizer's files from the source of the model"


def load_tokenizer(folder: str, key: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Args: key: of the model, for errors. Raises: ValueError with the files, if the tokenizer is missing, cannot be
    read or is code that must not run.
    """
    own = _code_of(folder)
    if own is not None and not trust_remote_code:
        raise ValueError(
            f"{key} is {folder}: its tokenizer is Python code in this folder ({own}), which is not run. Set "
            "trainer.trust_remote_code=true if you trust its authors, or use a copy of the model with a tokenizer.json "
            "that transformers reads"
        )
    if own is None and not any(Path(folder, name).is_file() for name in VOCABULARIES):
        raise ValueError(f"{folder} has no tokenizer: none of {', '.join(VOCABULARIES)} exists. {REMEDY}")
    try:
        return AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    except Exception as error:  # raised by JSON, the tokenizers library or the tokenizer's class
        files = sorted(file.name for file in Path(folder).glob("*token*")) or list(VOCABULARIES[:1])
        reason = " ".join(str(error).split()).rstrip(".")
        raise ValueError(
            f"the tokenizer of {folder} ({', '.join(files)}) cannot be loaded: {type(error).__name__}: "
            f"{reason[:300]}. {REMEDY}"
        ) from error


def _code_of(folder: str) -> str | None:
    """The tokenizer's class in the model's own code, if nothing else can read the vocabulary."""
    file = Path(folder, "tokenizer_config.json")
    if not file.is_file() or Path(folder, "tokenizer.json").is_file():
        return None
    with contextlib.suppress(ValueError, AttributeError):  # transformers reports a damaged file
        named = json.loads(file.read_text()).get("auto_map") or {}
        classes = named.get("AutoTokenizer") if isinstance(named, dict) else named
        found = [name for name in ([classes] if isinstance(classes, str) else classes or []) if name]
        return found[-1] if found else None
    return None


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, vocab_size: int, model: str) -> None:
    """Raises: ValueError if the tokenizer has tokens beyond the model's vocabulary, or no tokens."""
    vocabulary = tokenizer.get_vocab()
    if not vocabulary:
        raise ValueError(f"the tokenizer of {model} has no tokens. {REMEDY}")
    last, token_id = max(vocabulary.items(), key=lambda item: item[1])
    if token_id >= vocab_size:
        raise ValueError(
            f"the tokenizer has {sum(number >= vocab_size for number in vocabulary.values())} tokens beyond the "
            f"vocabulary of {vocab_size} of {model}: the last is {last!r} with id {token_id}. {REMEDY}, or enlarge the "
            "model's embedding"
        )


def check_same_tokens(
    tokenizer: PreTrainedTokenizerBase, teacher: PreTrainedTokenizerBase, key: str, path: str
) -> None:
    """Raises: ValueError if a token of the policy has another id, or none, in the teacher's tokenizer.

    Further tokens of the teacher do no harm: it scores the policy's.
    """
    ids = teacher.get_vocab()
    other = {token: number for token, number in tokenizer.get_vocab().items() if ids.get(token) != number}
    if other:
        token, number = min(other.items(), key=lambda item: item[1])
        found = f"id {ids[token]}" if token in ids else "missing"
        raise ValueError(
            f"{key} is {path}: its tokenizer differs from the policy's in {len(other)} tokens, so that it would score "
            f"other text. The first is {token!r}: id {number} in the policy's, {found} in the teacher's. Use a teacher "
            "with the tokenizer of the policy"
        )
