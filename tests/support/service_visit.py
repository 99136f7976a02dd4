"""A program that uses a running service, for test_service.py; its arguments are NAME ADDRESS FOLDER."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import torch

from skyrl_train.service import JobFailed, TrainingService
from tests.support.checkpoints import tensors_of
from tests.support.jobs import actor_of

PROMPT = "yes, no or maybe?"


def ask(service: TrainingService, model: str, **options: Any) -> dict[str, Any]:
    body = {"model": model, "prompt": PROMPT, "max_tokens": 8, "temperature": 1.0, **options}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{service.openai_base_url}/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.load(answer)


def status_of(service: TrainingService, model: str) -> int:
    try:
        ask(service, model)
    except urllib.error.HTTPError as error:
        return error.code
    return 200


def sampled_tokens(service: TrainingService) -> list[dict[str, Any]]:
    """A group of the engine's own tokens and logprobs."""
    answer = ask(service, service.model_name, n=4, return_token_ids=True, logprobs=0)
    made_by = {name: answer[name] for name in ("policy_versions", "sampling_params")}
    group = []
    for index, choice in enumerate(answer["choices"]):
        asked, sampled = choice["prompt_token_ids"], choice["token_ids"]
        logprobs = [0.0] * len(asked) + choice["logprobs"]["token_logprobs"]
        mask = [0] * len(asked) + [1] * len(sampled)
        tokens = {"token_ids": asked + sampled, "loss_mask": mask, "logprobs": logprobs}
        group.append(tokens | made_by | {"reward": index / 4})
    return group


def chat_group(*rewards: float) -> list[dict[str, Any]]:
    asked = {"role": "user", "content": PROMPT}
    answers = ["yes", "no", "maybe", "7"]
    return [
        {"messages": [asked, {"role": "assistant", "content": answer}], "reward": reward}
        for answer, reward in zip(answers, rewards, strict=False)
    ]


def served(service: TrainingService, version: int) -> bool:
    """The engines serve this version and no other."""
    name = service.model_name
    statuses = [status_of(service, f"{name}@{v}") for v in (version - 1, version, version + 1)]
    return statuses == [404, 200, 404] and ask(service, name)["policy_versions"] == [version]


def nobody_is_there(address: str) -> None:
    try:
        TrainingService.connect("nobody", address)
    except ValueError as error:
        assert "name is nobody: no service with this name runs" in str(error), error
    else:
        raise AssertionError("somebody was there")


async def refused(service: TrainingService) -> None:
    version = service.policy_version
    bad = [chat_group(0, 1), [*sampled_tokens(service)[:1], {"token_ids": [1, 2], "loss_mask": [0, 1, 1], "reward": 1}]]
    try:
        await service.train(bad)
    except ValueError as error:
        assert str(error) == (
            "group 1, sample 1: token_ids has 2 entries and loss_mask 3: they must be equally many"
        ), error
    else:
        raise AssertionError("it was not refused")
    assert service.policy_version == version and served(service, version)


async def trained(service: TrainingService) -> None:
    version = service.policy_version
    group = sampled_tokens(service)
    others = [one | {"logprobs": [value - 1.0 for value in one["logprobs"]]} for one in group]
    try:
        await service.train([others])
    except JobFailed as error:
        assert "differ by 1 nats" in str(error), error
        assert f"nothing was changed; still serving version {version}" in str(error), error
    else:
        raise AssertionError("logprobs of another model were trained on")
    of_tokens = await service.train([group])
    assert of_tokens["policy/rollout_train_logprobs_compared"] == 1.0
    # The engine's logprobs of its own tokens are the trainer's: nothing was mixed up on the way.
    assert 0 < of_tokens["policy/rollout_train_logprobs_abs_diff_mean"] < 1e-4, of_tokens
    assert of_tokens["service/policy_version"] == version + 1 and served(service, version + 1)
    of_chat = await service.train([chat_group(0.5, 0.75, 1.0)])
    assert "policy/rollout_train_logprobs_abs_diff_mean" not in of_chat, "nobody gave logprobs"
    assert of_chat["reward/avg_raw_reward"] == 0.75 and of_chat["policy/grad_norm"] > 0
    assert served(service, version + 2)
    together = await asyncio.gather(*(service.train([chat_group(0, 0.5, 1.0)]) for _ in range(3)))
    versions = sorted(one["service/policy_version"] for one in together)  # Ray may swap calls made at once
    assert versions == [version + 3, version + 4, version + 5], versions
    rows = [{"messages": sample["messages"]} for sample in chat_group(0, 0, 0)]
    examples = await service.train_sft(rows)
    assert examples["service/policy_version"] == version + 6 and 0 < examples["sft/loss"] < 20


async def lost_an_engine_while_idle(service: TrainingService) -> None:
    """Another one takes its place without a job."""
    version = service.policy_version
    os.kill(actor_of(Path(service.run_dir, "logs/engine-0.log")).pid, signal.SIGKILL)
    deadline = time.monotonic() + 240
    while True:
        assert time.monotonic() < deadline, "no engine came"
        try:
            assert served(service, version)
            break
        except OSError:
            await asyncio.sleep(0.5)
    examples = await service.train_sft([{"messages": chat_group(1)[0]["messages"]}])
    assert examples["service/policy_version"] == version + 1 and served(service, version + 1)


async def crashed(service: TrainingService) -> None:
    """A dead rank costs the job, and nothing of what was learned before it."""
    version = service.policy_version
    os.kill(actor_of(Path(service.run_dir, "logs/policy-0.log")).pid, signal.SIGKILL)
    jobs = [service.train([chat_group(0, 0.5, 1.0)]), service.train([chat_group(1.0, 0.5, 0)])]
    ended = await asyncio.gather(*jobs, return_exceptions=True)
    failed, followed = sorted(ended, key=lambda one: isinstance(one, dict))  # Ray may swap calls made at once
    assert isinstance(failed, JobFailed), failed
    assert f"the trainer was restarted at version {version}" in str(failed), failed
    assert isinstance(followed, dict) and followed["service/policy_version"] == version + 1, followed
    assert served(service, version + 1)


async def crashed_while_idle(service: TrainingService, folder: Path) -> None:
    """The weights after the restart are those before it, bit for bit."""
    await service.save(str(folder / "before"))
    os.kill(actor_of(Path(service.run_dir, "logs/policy-0.log")).pid, signal.SIGKILL)
    version = service.policy_version
    with contextlib.suppress(JobFailed):
        await service.train([chat_group(0, 0.5, 1.0)])
    await service.save(str(folder / "restarted"))
    assert same(folder / "before", folder / "restarted") and served(service, version)


def same(one: Path, other: Path) -> bool:
    mine, theirs = tensors_of(one), tensors_of(other)
    assert mine, one
    return mine.keys() == theirs.keys() and all(torch.equal(mine[name], theirs[name]) for name in mine)


async def visit(name: str, address: str, folder: str) -> None:
    service = TrainingService.connect(name, address)
    nobody_is_there(address)
    await refused(service)
    await trained(service)
    await crashed_while_idle(service, Path(folder))
    await crashed(service)
    await lost_an_engine_while_idle(service)
    numbers = []
    async for record in service.metrics():
        numbers.append(record["service/job"])
        if record["service/policy_version"] == service.policy_version:
            break
    assert numbers == [float(number) for number in range(1, len(numbers) + 1)] and len(numbers) >= 7
    print("all is well")


if __name__ == "__main__":
    asyncio.run(visit(*sys.argv[1:]))
