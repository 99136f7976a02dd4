"""config.json of released models as their publishers wrote them, and what becomes of each."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

CONFIGS: dict[str, dict[str, Any]] = json.loads(
    (Path(__file__).parents[1] / "data" / "released_configs.json").read_text()
)
FAMILY = "The families that can be trained are"
REFUSED = {
    "Qwen/Qwen2.5-7B-Instruct-1M": "dual_chunk_attention_config",
    "Qwen/Qwen3-32B-FP8": "quantization_config",
    "deepseek-ai/DeepSeek-V2-Lite": FAMILY,
    "google/gemma-3-1b-it": FAMILY,
    "microsoft/Phi-4-mini-instruct": FAMILY,
    "mistralai/Ministral-8B-Instruct-2410": "sliding_window is 32768",
    "mistralai/Mistral-7B-v0.1": "sliding_window is 4096",
    "moonshotai/Kimi-K2-Instruct": FAMILY,
    "openai/gpt-oss-20b": FAMILY,
}
"""Model -> part of the reason why it is refused. All others are accepted."""
ONE_PER_FAMILY = (
    "Qwen/Qwen2.5-1.5B",
    "Qwen/Qwen2-57B-A14B",
    "Qwen/Qwen3-4B",
    "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "meta-llama/Llama-3.2-1B",
    "mistralai/Mistral-Nemo-Instruct-2407",
    "mistralai/Mixtral-8x7B-v0.1",
    "zai-org/GLM-4.5-Air",
    "zai-org/GLM-4.7-Flash",
    "deepseek-ai/DeepSeek-V3",
    "moonshotai/Moonlight-16B-A3B-Instruct",
)
