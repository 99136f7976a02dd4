"""How large a KV cache can be of use: all sequences at once, each as long as it may get.

vLLM takes all memory it may for its cache. Between two weight updates the sequences of one step are all that fills it,
and on shared devices every byte is unmapped and mapped again at each turn.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skyrl_train.engines.settings import NUM_BYTES, EngineSettings
from skyrl_train.hf.checkpoint import tensor_shapes

BLOCK = 128
"""Tokens; a multiple of the blocks into which vLLM's attention backends cut a sequence."""
CACHED = re.compile(r"\.layers\.(\d+)\.self_attn\.(k_proj|v_proj|kv_a_proj_with_mqa)\.weight$")
"""Matrices whose rows are what a layer keeps of a token."""


def most_cache_bytes(settings: EngineSettings, num_sequences: int) -> int | None:
    """Bytes that so many sequences of `max_model_len` tokens fill on one worker of the engine.

    None where the checkpoint does not say it: not every layer keeps keys and values, or they are made by other names.
    """
    config = json.loads(Path(settings.model_path, "config.json").read_text())
    per_token = _numbers_per_token(tensor_shapes(settings.model_path), config, settings.tensor_parallel_size)
    if per_token is None:
        return None
    longest = settings.generator.engine_init_kwargs.get("max_model_len", settings.max_model_len)
    tokens = -(-longest // BLOCK) * BLOCK
    return (num_sequences + 1) * tokens * per_token * NUM_BYTES[settings.generator.model_dtype]


def _numbers_per_token(
    shapes: Mapping[str, tuple[int, ...]], config: Mapping[str, Any], tensor_parallel_size: int
) -> int | None:
    """Of one worker, which has at least one head of keys and values; a latent vector is whole on each."""
    heads, num_layers = config.get("num_key_value_heads") or 1, config.get("num_hidden_layers", 0)
    total, found = 0, set()
    for name, shape in shapes.items():
        match = CACHED.search(name)
        if match and int(match[1]) < num_layers:  # those after the last predict further tokens, which vLLM leaves out
            found.add(match[1])
            is_latent = match[2] == "kv_a_proj_with_mqa"
            total += shape[0] if is_latent else shape[0] // min(tensor_parallel_size, heads)
    return total if num_layers and len(found) == num_layers else None
