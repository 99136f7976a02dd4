"""Stop strings that an engine must search for among special tokens."""

from __future__ import annotations

import functools
from typing import Any


@functools.lru_cache(maxsize=256)
def has_special_token(stop: tuple[str, ...], tokenizer: Any) -> bool:
    """Whether one of the strings contains a special token, such as `<|im_end|>`. vLLM finds it only in text that has
    these tokens (`skip_special_tokens=False`); other strings are searched in the text that environments get.
    """
    ids = [tokenizer.encode(each, add_special_tokens=False) for each in stop]
    return any(tokenizer.decode(each, skip_special_tokens=True) != tokenizer.decode(each) for each in ids)
