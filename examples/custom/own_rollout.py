"""A rollout of your own: it queries the engines itself and splits one conversation into two samples."""

from __future__ import annotations

from skyrl_train.rollout.contract import Engines
from skyrl_train.rollout.trace import Trace
from skyrl_train.types import Message, Prompt, Sample, SamplingParams


async def draft_and_revise(prompt: Prompt, sampling_params: SamplingParams, engines: Engines) -> list[Sample]:
    """A draft, and a revision by a policy that has read it: both are trained, each with its own reward."""
    draft, text = await answer(prompt.messages, prompt.uid, sampling_params, engines)
    conversation = [*prompt.messages, {"role": "assistant", "content": text}, prompt.messages[-1]]
    revision, _ = await answer(conversation, prompt.uid, sampling_params, engines)
    return [draft, revision]


async def answer(
    messages: list[Message], route_key: str, sampling_params: SamplingParams, engines: Engines
) -> tuple[Sample, str]:
    """Send one request; return its sample and its text."""
    trace = Trace()
    trace.read(engines.chat.prompt_ids(messages), messages)
    generation = await engines.generate(trace.input_ids(), sampling_params, route_key)
    trace.write(generation)
    trace.add_reward(min(1.0, sum(map(str.isdigit, generation.text)) / engines.config.extra["wanted_digits"]))
    return trace.to_sample(), generation.text
