"""A rollout whose responses have lengths spread over orders of magnitude, as those of hard and easy prompts do."""

from __future__ import annotations

import random
from dataclasses import replace

from skyrl_train.rollout.contract import Engines
from skyrl_train.rollout.trace import Trace
from skyrl_train.types import Prompt, Sample, SamplingParams

SPREAD_LENGTHS = "benchmarks.lib.spread_lengths:spread"


async def spread(prompt: Prompt, sampling_params: SamplingParams, engines: Engines) -> Sample:
    """One response of a length between extra.shortest and `max_generate_length`, uniform in its logarithm.

    The length depends on the prompt and the rollout's seed alone, so every kind of run generates the same lengths. The
    reward is the fraction of digits in the response.
    """
    shortest, longest = engines.config.extra["shortest"], sampling_params.max_generate_length
    uniform = random.Random(f"{prompt.uid} {sampling_params.seed}").random()
    length = round(shortest * (longest / shortest) ** uniform)
    trace = Trace()
    trace.read(engines.chat.prompt_ids(prompt.messages), prompt.messages)
    limited = replace(sampling_params, max_generate_length=length)
    generation = await engines.generate(trace.input_ids(), limited, prompt.uid)
    trace.write(generation)
    trace.add_reward(sum(map(str.isdigit, generation.text)) / max(1, len(generation.text)))
    return trace.to_sample()
