"""Sampling parameters of an HTTP request as the engine applies them, defaults included."""

from __future__ import annotations

from typing import Any

NUMBERS = ("temperature", "top_p", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty")
CONSTRAINTS = (
    "logit_bias",
    "allowed_token_ids",
    "bad_words",
    "structured_outputs",
    "logits_processors",
    "thinking_token_budget",
)
"""Other parameters that exclude tokens or change their probabilities."""


def sampling_facts(params: Any) -> dict[str, float | bool]:
    """The numbers, and `true` for each constraint that is set. Args: params: vLLM's SamplingParams."""
    facts: dict[str, float | bool] = {name: getattr(params, name) for name in NUMBERS}
    facts["top_k"] = params.top_k if params.top_k > 0 else -1
    if params.min_tokens > 0:
        facts["min_tokens"] = params.min_tokens
    return facts | {name: True for name in CONSTRAINTS if getattr(params, name, None) not in (None, [], {})}
