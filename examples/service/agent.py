"""An agent in its own process: it queries the model over HTTP, scores the answers and submits them.

    python agent.py NAME ADDRESS

The model is first taught to answer at all (supervised, from examples), then rewarded: 1 for maybe, 0.75 for no, 0.5 for
yes, 0 for anything else. Kill it and start it again whenever you like: the service keeps the training state and reports
its version.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

from skyrl_train.service import ServiceBroken, StaleSamples, TrainingService

REWARDS = {"maybe": 1.0, "no": 0.75, "yes": 0.5}
PROMPTS = ["yes, no or maybe?", "maybe, no or yes?", "no, yes or maybe?", "say one of the three:"]
NUM_EXAMPLE_JOBS, NUM_JOBS, SAMPLES = 20, 40, 16


class Moved(Exception):
    """The requested version is no longer served."""


def ask(url: str, model: str, prompt: str) -> dict[str, Any]:
    """One answer, sampled at temperature 1."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 8, "temperature": 1.0}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    try:
        with urllib.request.urlopen(request, timeout=120) as answer:
            return json.load(answer)
    except urllib.error.HTTPError as error:
        if error.code == 404:
            raise Moved from None
        raise


def conversation(prompt: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]


def sample(prompt: str, answer: dict[str, Any]) -> dict[str, Any]:
    """What the service trains on. It refuses samples that other weights generated, fully or in part."""
    choice = answer["choices"][0]
    text = choice["message"]["content"] or ""
    return {
        "messages": conversation(prompt, text),
        "reward": REWARDS.get(text, 0.0),
        "policy_versions": answer["policy_versions"],
        "sampling_params": answer["sampling_params"],
        "finish_reason": choice["finish_reason"],
    }


async def main(name: str, address: str) -> None:
    service = TrainingService.connect(name, address)
    threads = ThreadPoolExecutor(SAMPLES)
    while (version := service.policy_version) < NUM_JOBS:  # one optimizer step per job
        if version < NUM_EXAMPLE_JOBS:
            rows = [{"messages": conversation(prompt, answer)} for prompt in PROMPTS for answer in REWARDS]
            metrics = await service.train_sft(rows)
            print(f"version {service.policy_version}: loss on the examples {metrics['sft/loss']:.3f}", flush=True)
            continue
        asked = [prompt for prompt in PROMPTS for _ in range(SAMPLES)]
        print(f"samples from version {version}", flush=True)
        try:
            url = service.openai_base_url
            answers = list(threads.map(partial(ask, url, f"{service.model_name}@{version}"), asked))
            samples = [sample(prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]
            groups = [samples[start : start + SAMPLES] for start in range(0, len(samples), SAMPLES)]
            print(f"submits samples of version {version}", flush=True)
            metrics = await service.train(groups)
        except (Moved, StaleSamples):  # another caller's job came between, or that of an earlier life
            print(f"version {version} is no longer served: samples again", flush=True)
            continue
        except OSError as error:  # the engine is lost; another one is started
            print(f"no answer ({error}): asks again", flush=True)
            await asyncio.sleep(1)
            continue
        reward = metrics["reward/avg_raw_reward"]
        maybe = sum(one["messages"][-1]["content"] == "maybe" for one in samples) / len(samples)
        print(f"version {service.policy_version}: mean reward {reward:.3f}, maybe {maybe:.0%}", flush=True)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python agent.py NAME ADDRESS, which the service prints when it starts")
    try:
        asyncio.run(main(*sys.argv[1:]))
    except (ValueError, ServiceBroken) as error:  # no such service, or it cannot train any more
        sys.exit(f"error: {error}")
