"""Speculative decoding with n-grams: Hugging Face's logprobs, and samples of the model's own distribution."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from skyrl_train.types import SamplingParams
from tests.support.live_engine import PROMPTS, World, greedy, live_world, run

pytestmark = pytest.mark.slow
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}
REPEATED = [prompt * 4 for prompt in PROMPTS]
"""Prompts in which most tokens have occurred before, so that there are drafts."""


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    arguments = {"block_size": 32, "speculative_config": DRAFTS}
    yield from live_world(tmp_path_factory.mktemp("speculation"), engine_init_kwargs=arguments)


@torch.no_grad()
def logprobs(world: World, token_ids: list[int]) -> torch.Tensor:
    """[tokens, vocabulary], row i of the token after the i-th."""
    return world.models[0](torch.tensor([token_ids])).logits[0].log_softmax(-1)


def test_likeliest_tokens_are_those_of_the_model(world: World):
    params = SamplingParams(max_generate_length=40, temperature=0.0)
    for prompt, generation in zip(REPEATED, run(world.generate(REPEATED, params)), strict=True):
        tokens, expected = greedy(world.models[0], prompt, 40)
        assert generation.token_ids == tokens
        assert generation.logprobs == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_sampled_tokens_have_the_logprobs_of_the_model(world: World, temperature: float):
    params = SamplingParams(max_generate_length=40, temperature=temperature, seed=7)
    for prompt, generation in zip(REPEATED, run(world.generate(REPEATED, params)), strict=True):
        rows = (logprobs(world, prompt + generation.token_ids)[len(prompt) - 1 : -1] / temperature).log_softmax(-1)
        expected = rows.gather(1, torch.tensor(generation.token_ids)[:, None])[:, 0].tolist()
        assert generation.logprobs == pytest.approx(expected, abs=1e-5)


def test_tokens_with_a_draft_are_sampled_as_often_as_the_model_says(world: World):
    """The second token of a response has a draft if the first one is in the prompt: what followed it there. Taking
    drafts too often or too rarely changes the mean of a token's logprob by much more than five standard errors."""
    prompt, temperature = [*range(4, 54)] * 2, 0.5
    params = SamplingParams(max_generate_length=2, temperature=temperature)
    pairs = [generation.token_ids for generation in run(world.generate([prompt] * 1500, params))]
    pairs = [pair for pair in pairs if len(pair) == 2 and pair[0] in prompt]
    rows = {first: (logprobs(world, [*prompt, first])[-1] / temperature).log_softmax(-1) for first, _ in pairs}
    means = {first: float((row.exp() * row).sum()) for first, row in rows.items()}
    variances = {first: float((row.exp() * (row - means[first]) ** 2).sum()) for first, row in rows.items()}
    excess = sum(float(rows[first][second]) - means[first] for first, second in pairs)
    assert len(pairs) > 500
    assert abs(excess) < 5 * sum(variances[first] for first, _ in pairs) ** 0.5
