"""A program with a service whose trainer and engine take turns, for test_service.py."""

from __future__ import annotations

import asyncio
import os
import signal
import time
from pathlib import Path

import psutil

from skyrl_train.config import load_config
from skyrl_train.service import ServiceBroken, StaleSamples, TrainingService
from tests.support.service_visit import ask, served

ROW = {"input_ids": [5, 6, 7, 8], "labels": [-100, -100, 7, 8]}
OVERRIDES = [
    "trainer.policy.model.path=model",
    "trainer.run_name=turns",
    "trainer.placement.colocate_all=true",
    "trainer.bf16=false",
    "trainer.max_tokens_per_microbatch=96",
    "trainer.max_prompt_length=16",
    "trainer.algorithm.use_kl_loss=false",
    "generator.kv_cache_memory_gb=0.0625",
    "generator.enable_http_endpoint=true",
    "generator.http_endpoint_port=0",
    "generator.sampling_params.max_generate_length=8",
]


def alive(run_dir: str) -> dict[str, list[int]]:
    """Log file -> processes that write it."""
    found: dict[str, list[int]] = {}
    for process in psutil.process_iter():
        try:
            log = Path(os.readlink(f"/proc/{process.pid}/fd/1"))
        except OSError:
            continue
        if str(log.parent) == f"{run_dir}/logs" and process.status() != psutil.STATUS_ZOMBIE:
            found.setdefault(log.stem, []).append(process.pid)
    return found


async def until(condition: object, what: str, patience_s: float) -> None:
    deadline = time.monotonic() + patience_s
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, what
        await asyncio.sleep(0.1)


async def main() -> None:
    service = TrainingService.start(load_config(OVERRIDES), keep_state=False)
    await service.train_sft([ROW])
    assert served(service, 1)
    old = {"token_ids": [5, 6, 7], "loss_mask": [0, 1, 1], "reward": 1.0, "policy_versions": [0]}
    try:
        await service.train([[old, old]])
    except StaleSamples as error:
        assert str(error).endswith("nothing was changed; still serving version 1"), error
    else:
        raise AssertionError("samples of version 0 were trained")
    assert ask(service, service.model_name)["policy_versions"] == [1]

    (rank,), (owner,) = (alive(service.run_dir)[name] for name in ("policy-0", "service"))
    os.kill(rank, signal.SIGSTOP)
    job = asyncio.ensure_future(service.train_sft([ROW]))
    await asyncio.sleep(1)
    os.kill(owner, signal.SIGKILL)
    os.kill(rank, signal.SIGCONT)
    try:
        await job
    except ServiceBroken as error:
        assert "the service's process has ended" in str(error), error
    else:
        raise AssertionError("nobody noticed")
    await until(lambda: not alive(service.run_dir), "engine and rank live on without their service", 120)
    print("all is well")


if __name__ == "__main__":
    asyncio.run(main())
