"""An agent that lives outside the trainer: it asks the model over HTTP, scores the answers and hands them in.

    python agent.py NAME ADDRESS

The model is first taught to answer at all (supervised, from examples), then rewarded: 1 for maybe, 0.75 for no, 0.5 for
yes, 0 for anything else. Kill it and start it again whenever you like: what has been learned is the service's, and how
far it is, it asks the service.
"""

from __future__ import annotations

import asyncio
import json
import sys
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from skyrl_train.service import TrainingService

REWARDS = {"maybe": 1.0, "no": 0.75, "yes": 0.5}
PROMPTS = ["yes, no or maybe?", "maybe, no or yes?", "no, yes or maybe?", "say one of the three:"]
NUM_EXAMPLE_JOBS, NUM_JOBS, SAMPLES = 20, 40, 16


def ask(url: str, model: str, prompt: str) -> str:
    """One answer, drawn at temperature 1."""
    body = {"model": model, "messages": [{"role": "user", "content": prompt}], "max_tokens": 8, "temperature": 1.0}
    request = urllib.request.Request(
        f"{url}/chat/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)["choices"][0]["message"]["content"] or ""


def sample(prompt: str, answer: str) -> dict[str, object]:
    """What the service trains on."""
    messages = [{"role": "user", "content": prompt}, {"role": "assistant", "content": answer}]
    return {"messages": messages, "reward": REWARDS.get(answer, 0.0)}


async def main(name: str, address: str) -> None:
    service = TrainingService.connect(name, address)
    url, threads = service.openai_base_url, ThreadPoolExecutor(SAMPLES)
    while (version := service.policy_version) < NUM_JOBS:  # one optimizer step per job
        if version < NUM_EXAMPLE_JOBS:
            rows = [{"messages": sample(prompt, answer)["messages"]} for prompt in PROMPTS for answer in REWARDS]
            metrics = await service.train_sft(rows)
            print(f"version {service.policy_version}: loss on the examples {metrics['sft/loss']:.3f}", flush=True)
            continue
        model = f"{service.model_name}@{version}"  # exactly these weights, or an error
        asked = [prompt for prompt in PROMPTS for _ in range(SAMPLES)]
        answers = list(threads.map(partial(ask, url, model), asked))
        samples = [sample(prompt, answer) for prompt, answer in zip(asked, answers, strict=True)]
        groups = [samples[start : start + SAMPLES] for start in range(0, len(samples), SAMPLES)]
        metrics = await service.train(groups)
        reward, maybe = metrics["reward/avg_raw_reward"], answers.count("maybe") / len(answers)
        print(f"version {service.policy_version}: mean reward {reward:.3f}, maybe {maybe:.0%}", flush=True)


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
