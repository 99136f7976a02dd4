"""Functions that generators of skyrl_train 0.4 call, against values computed by hand."""

from __future__ import annotations

import pytest
import skyrl_gym  # noqa: F401 (environments whose metrics are aggregated)

from skyrl_train.compat.generators.functions import (
    get_response_ids_and_loss_mask_from_messages,
    get_rollout_metrics,
    get_sampling_params_for_backend,
)
from skyrl_train.config import load_config
from tests.support.tiny import chatml_tokenizer

CHAT = chatml_tokenizer()
MESSAGES = [
    {"role": "assistant", "content": "12"},
    {"role": "user", "content": "no"},
    {"role": "assistant", "content": "7"},
]


def test_messages_become_tokens_of_which_the_assistants_are_trained():
    """ChatML: the header is read, the text and the end of turn are written, the newline after it is not."""
    ids, mask, logprobs = get_response_ids_and_loss_mask_from_messages(MESSAGES, CHAT)
    first = "<|im_start|>assistant\n12<|im_end|>\n<|im_start|>user\nno<|im_end|>\n<|im_start|>assistant\n7<|im_end|>\n"
    assert ids == CHAT.encode(first, add_special_tokens=False) and logprobs is None
    written = [token for token, is_written in zip(ids, mask, strict=True) if is_written]
    assert written == CHAT.encode("12<|im_end|>7<|im_end|>", add_special_tokens=False)


def test_logprobs_stand_at_the_tokens_that_were_written():
    given = [[-1.0, -2.0, -3.0], [-4.0, -5.0]]
    _, mask, logprobs = get_response_ids_and_loss_mask_from_messages(MESSAGES, CHAT, given)
    assert logprobs is not None and len(logprobs) == len(mask)
    assert [value for value, is_written in zip(logprobs, mask, strict=True) if is_written] == [-1, -2, -3, -4, -5]
    assert not any(value for value, is_written in zip(logprobs, mask, strict=True) if not is_written)
    with pytest.raises(ValueError, match="a message has 3 tokens and 2 logprobs: they must be equal"):
        get_response_ids_and_loss_mask_from_messages(MESSAGES, CHAT, [[-1.0, -2.0], [-4.0, -5.0]])


def test_another_chat_template_may_be_given():
    template = "{% for m in messages %}{{ m['content'] }}<|im_end|>{% endfor %}"
    ids, mask, _ = get_response_ids_and_loss_mask_from_messages(MESSAGES[:1], CHAT, chat_template=template)
    assert ids == CHAT.encode("12<|im_end|>", add_special_tokens=False) and mask == [1, 1, 1]


def test_metrics_are_those_of_lengths_and_rewards():
    metrics = get_rollout_metrics([[1], [1, 2, 3]], [[0.0], [0.0, 0.5, 0.5]])
    assert metrics == {
        "generate/min_num_tokens": 1.0,
        "generate/max_num_tokens": 3.0,
        "generate/avg_num_tokens": 2.0,
        "generate/std_num_tokens": 1.0,
        "generate/avg_tokens_non_zero_rewards": 3.0,
        "generate/avg_tokens_zero_rewards": 1.0,
    }
    assert get_rollout_metrics([[1, 2]], [-1.0])["generate/avg_tokens_zero_rewards"] == 0.0


def test_metrics_of_environments_are_aggregated_by_their_class():
    metrics = get_rollout_metrics([[1], [2]], [0.0, 1.0], [{"turns": 1}, {"turns": 4}], ["addition", "addition"])
    assert metrics["environment/turns"] == 2.5


def test_sampling_parameters_of_the_configuration_have_the_names_of_vllm():
    given = {"max_generate_length": 8, "temperature": 0.5, "stop": ("!",)}
    assert get_sampling_params_for_backend("vllm", given) == {
        "max_tokens": 8,
        "temperature": 0.5,
        "stop": ["!"],
        "min_tokens": 1,
        "skip_special_tokens": True,
        "include_stop_str_in_output": True,
    }
    assert load_config([]).generator.backend == "vllm"
    with pytest.raises(ValueError, match="backend is sglang: requests are vLLM's. Use vllm"):
        get_sampling_params_for_backend("sglang", given)
