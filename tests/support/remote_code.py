"""A model whose tokenizer is a class in its own folder, as in some published models, with no file in its place."""

from __future__ import annotations

import json
from pathlib import Path

from skyrl_train.tasks.tiny import CHAT_TEMPLATE, EOS, PAD, UNK, VOCABULARY
from tests.support.tiny import write_tiny_model

# The folder also records every process that imports the class.
SOURCE = '''\
import json
import os
from pathlib import Path

from transformers import PreTrainedTokenizer


class Characters(PreTrainedTokenizer):
    """One token per character, from characters.json."""

    vocab_files_names = {"vocab_file": "characters.json"}
    model_input_names = ["input_ids", "attention_mask"]

    def __init__(self, vocab_file, **kwargs):
        self._ids = json.loads(Path(vocab_file).read_text())
        self._tokens = {number: token for token, number in self._ids.items()}
        if log := os.environ.get("CHARACTERS_LOG"):
            with open(log, "a") as file:
                file.write(f"{os.getpid()}\\n")
        super().__init__(**kwargs)

    @property
    def vocab_size(self):
        return len(self._ids)

    def get_vocab(self):
        return dict(self._ids)

    def _tokenize(self, text):
        return list(text)

    def _convert_token_to_id(self, token):
        return self._ids.get(token, self._ids["<unk>"])

    def _convert_id_to_token(self, index):
        return self._tokens[index]

    def convert_tokens_to_string(self, tokens):
        return "".join(tokens)

    def save_vocabulary(self, save_directory, filename_prefix=None):
        target = Path(save_directory, "characters.json")
        target.write_text(json.dumps(self._ids))
        return (str(target),)
'''


def write_model_with_code(folder: Path, **changes: object) -> Path:
    """A tiny Qwen3 whose tokenizer is `tokenization_characters.Characters`. Args: changes: to its configuration."""
    write_tiny_model(folder, **changes)
    (folder / "tokenizer.json").unlink()
    (folder / "tokenization_characters.py").write_text(SOURCE)
    (folder / "characters.json").write_text(json.dumps({token: number for number, token in enumerate(VOCABULARY)}))
    settings = {
        "tokenizer_class": "Characters",
        "auto_map": {"AutoTokenizer": ["tokenization_characters.Characters", None]},
        "eos_token": EOS,
        "pad_token": PAD,
        "unk_token": UNK,
        "chat_template": CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "chat_template.jinja").unlink(missing_ok=True)
    return folder
