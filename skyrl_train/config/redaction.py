"""Secrets of a configuration, and their removal from everything that a run writes or sends.

A secret is found by the name of its key, at any depth and in the environment; its value is then masked wherever it
appears. A new key needs no entry here, unless its name looks like a secret's and it is none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


MASK = "***"
"""Written in place of a secret."""
SHORT, LONG = 4, 8
"""Lengths of values in characters: one below SHORT is masked only under its own key, one below LONG only between other
characters than letters and digits, because it may be part of an ordinary word."""
NO_SECRETS = _words("auto basic bearer dummy empty false none null true")
"""Values that say that there is no secret, or of what kind it is."""
SECRET_WORDS = _words(
    "key token secret pass password passwd passphrase pat jwt cred credential credentials auth authorization "
    "bearer cookie dsn apikey authkey accesskey secretkey privatekey apitoken authtoken accesstoken hftoken"
)
"""Last words of the names of secrets; a plural counts as well, except `tokens`."""
COUNTED_KEYS = _words(
    "answer cache column data dict difficulty field foreign group id image index input json label map message name num "
    "output partition primary problem prompt query question response reward row sample solution sort target text truth "
    "uid value"
)
"""Words before `key` in names of what is looked up: `prompt_key`."""
COUNTED_TOKENS = _words(
    "additional audio begin bos call class cls end eos eot first image last mask max min new next num pad per prompt "
    "sep special start stop think tool unk video vision"
)
"""Words before `token` in names of what a tokenizer has: `eos_token`."""
STRONG = _words(
    "access api app auth bearer client encryption hf http hub master private refresh secret session signing ssh wandb"
)
"""Words before `key`, `token` and `tokens` that leave no doubt."""
_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+")
_NAMES = re.compile(r"[\w.-]+")
_REFERENCE = re.compile(r"(null|\$\{[^}]*\})?")
"""A value that is taken from elsewhere, such as `${oc.env:NAME}`, or none at all."""
_USER_OF_URL = re.compile(r"(\w+://)[^\s'\"?#]*@")
_PASSWORD_OF_URL = re.compile(r"\w+://[^/\s'\"@:]*:([^\s'\"?#]+)@")
_SCHEME = re.compile(r"(?i)(bearer|basic) +(\S+)")
"""The value of an Authorization header."""
_NAMED = (
    re.compile(r"([?&;] *|^(?=[^;]*;))([\w.-]+)(=)([^\s'\"&;#\\]+)"),
    re.compile(r"(?i)^()([\w-]+)(: *)((?:(?:bearer|basic) +)?[^\s{]+)$"),
)
"""Text before, name, separator and value: in the query of a URL or a connection string, and in a header."""
_MASKED = re.compile(r"(?<!\*)\*{3}(?!\*)")
_MARKED = re.compile(r"\*{3}\w([^*\n]*[^*\s/=:;&@])?\*{3}")
"""Markdown's bold italics."""


def is_masked(text: str) -> bool:
    """Whether a secret was masked in it: not where asterisks mark words, or divide the lines of a prompt."""
    lines = text.splitlines()
    if len(lines) > 1:
        lines = [line for line in lines if line.strip() != MASK]
    return any(_MASKED.search(_MARKED.sub("", line)) is not None for line in lines)


def is_secret_name(name: str) -> bool:
    """Whether a key or an environment variable of this name holds a secret. Args: name: dotted or not."""
    before, last, singular = _end_of(name)
    if last == "tokens":
        return before in STRONG
    if singular == "key":
        return before not in COUNTED_KEYS
    if singular == "token":
        return before not in COUNTED_TOKENS
    return singular in SECRET_WORDS or (last == "pwd" and before not in ("", "old"))


def _end_of(name: str) -> tuple[str, str, str]:
    """The last two words of a name in lower case, and the singular of the last."""
    words = ["", "", *(word.lower() for word in _WORDS.findall(name.rpartition(".")[2]))]
    last = words[-1]
    return words[-2], last, last if last in ("pass", "credentials") else last.removesuffix("s")


def _is_told_apart(name: str, value: str) -> bool:
    """Whether the value of a secret's key may be masked in other text too: a doubtful key may hold a common word."""
    before, _, singular = _end_of(name)
    if singular not in ("key", "token") or before in STRONG:
        return True
    return len(value) >= 2 * LONG or (len(value) >= LONG and any(map(str.isdigit, value)))


def _without_value(found: re.Match[str]) -> str:
    before, name, separator, value = found.groups()
    is_open = not is_secret_name(name) or _REFERENCE.fullmatch(value) is not None
    return found[0] if is_open else f"{before}{name}{separator}{MASK}"


@dataclass(frozen=True)
class Secrets:
    """Values that must not be written, and the masking of text and configurations that may hold them."""

    values: tuple[str, ...] = ()
    """Longest first, so that a value that contains another is masked completely."""

    def text(self, text: str) -> str:
        """`text` with every secret value, the user and password of every URL, and what a secret's name precedes in its
        query, in a connection string or a header, masked.
        """
        for value in self.values:
            if len(value) >= LONG:
                text = text.replace(value, MASK)
            elif value in text:
                text = re.sub(rf"(?<![^\W_]){re.escape(value)}(?![^\W_])", MASK, text)
        for pattern in _NAMED:
            text = pattern.sub(_without_value, text)
        return _USER_OF_URL.sub(rf"\1{MASK}@", text)

    def plain(self, value: Any, name: str = "") -> Any:
        """Nested dictionaries, lists and scalars; strings that contain a secret value are masked as text.

        Args: name: the key that holds `value`; the value of a secret's key is masked completely.
        """
        if is_secret_name(name) and not (value is None or isinstance(value, bool) or value in ("", {}, [], ())):
            return value if isinstance(value, str) and _REFERENCE.fullmatch(value) else MASK
        if isinstance(value, Mapping):
            return {key: self.plain(item, str(key)) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.plain(item) for item in value]
        return self.text(value) if isinstance(value, str) else value

    def argument(self, argument: str) -> str:
        """An argument of a command line; the complete value of a secret's key is masked, with its commas and blanks."""
        key, separator, value = argument.partition("=")
        if separator and is_secret_name(key):
            return self.text(key) + "=" + (value if _REFERENCE.fullmatch(value) else MASK)
        if separator and value.lstrip()[:1] in ("{", "[") and any(map(is_secret_name, _NAMES.findall(value))):
            try:
                nested = OverridesParser.create().parse_override(argument).value()
            except HydraException:
                return f"{self.text(key)}={MASK}"
            return f"{self.text(key)}={_line(self.plain(nested))}"
        return self.text(argument)


BY_NAME = Secrets()
"""Masks what a name or a URL gives away; no value is known."""


def secrets_of(values: Any, environment: Mapping[str, str] = os.environ) -> Secrets:
    """The secrets of a configuration and of the environment. Args: values: nested dictionaries, lists and scalars."""
    found = {text for text in _secret_texts(values, environment) if len(text) >= SHORT}
    found |= {text for name, text in environment.items() if is_secret_name(name) and len(text) >= LONG}
    found -= {MASK, *(text for text in found if text.lower() in NO_SECRETS)}
    return Secrets(tuple(sorted(found, key=lambda text: (-len(text), text))))


def _secret_texts(value: Any, environment: Mapping[str, str], name: str = "") -> Iterator[str]:
    """Every text below a secret's key, the environment variable that an `..._env` key names, URLs' passwords, and what
    a secret's name precedes inside a text.
    """
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _secret_texts(item, environment, name if is_secret_name(name) else str(key))
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _secret_texts(item, environment, name)
    elif is_secret_name(name) and (isinstance(value, str) or (isinstance(value, int) and value >= 10 ** (LONG - 1))):
        if _is_told_apart(name, str(value)):
            yield str(value)
        if isinstance(value, str) and (scheme := _SCHEME.fullmatch(value)):
            yield scheme[2]
    elif isinstance(value, str) and name.endswith("_env") and is_secret_name(name.removesuffix("_env")):
        yield environment.get(value, "")
    elif isinstance(value, str):
        yield from _PASSWORD_OF_URL.findall(value)
        for _, own, _, text in (found for pattern in _NAMED for found in pattern.findall(value)):
            if is_secret_name(own):
                yield from _secret_texts(text, environment, own)


def _line(value: Any) -> str:
    """A value in the notation of a command line."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {_line(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_line, value)) + "]"
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)


@contextlib.contextmanager
def hidden_in_logs(secrets: Secrets) -> Iterator[None]:
    """Mask secrets in every line that this process logs inside the block."""

    def hide(record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if (masked := secrets.text(message)) != message:
            record.msg, record.args = masked, ()
        if record.exc_info:
            record.exc_text = secrets.text(logging.Formatter().formatException(record.exc_info))
        return True

    handlers = list(logging.getLogger().handlers)
    for handler in handlers:
        handler.addFilter(hide)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(hide)
