"""Updates of a small policy with every way to leave its device between them: does each end at the same bits?

    python benchmarks/release.py --steps 10 [--model FOLDER] [--ranks 2] [key=value ...]

Prints a line per mode with the seconds of the moves; exits with 1 where a bit of weights, optimizer state, torch's and
Megatron's random states or metrics differs from those of a policy that stayed.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from transformers import AutoConfig, Qwen3ForCausalLM

from skyrl_train.batching.build import build_experience
from skyrl_train.batching.split import split
from skyrl_train.cluster.launch import launch_policy
from skyrl_train.cluster.ranks.release import Exit, Offload, Release, Stay
from skyrl_train.cluster.ranks.shards import Shards
from skyrl_train.cluster.session import Cluster, connect
from skyrl_train.config import Config, load_config
from skyrl_train.ranks import OPTIMIZER, WEIGHTS
from skyrl_train.tasks.tiny import model_config, tokenizer
from skyrl_train.trainer.rules import advantage, micro_batch_rules, objective
from skyrl_train.types import Group, Metrics, Prompt, Sample, TrainBatch

PROMPTS, SAMPLES, TOKENS = 4, 4, 24


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--model", help="folder of a Hugging Face checkpoint; a random one of 0.3 million by default")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("overrides", nargs="*")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, connect() as cluster:
        model = options.model or _tiny_model(Path(folder, "model"))
        config = load_config(
            [
                f"trainer.policy.model.path={model}",
                f"trainer.placement.policy_num_gpus_per_node={options.ranks}",
                f"trainer.train_batch_size={PROMPTS}",
                f"trainer.policy_mini_batch_size={PROMPTS // 2}",
                f"trainer.placement.state_path={folder}/turns",
                "trainer.algorithm.use_kl_loss=false",
                "trainer.policy.optimizer_config.lr=1e-3",
                *options.overrides,
            ]
        )
        modes: dict[str, Release] = {"none": Stay(), "offload": Offload(), "exit": Exit(config.trainer)}
        expected: tuple[list[Any], list[Metrics]] | None = None
        failed = False
        for name, release in modes.items():
            found, seconds = asyncio.run(_train(config, cluster, release, options.steps, Path(folder, name)))
            expected = expected or found
            same = _equal(found, expected)
            failed |= not same
            leave, enter = (f"{sum(part) / options.steps:.3f} s" for part in seconds)
            verdict = "the same bits" if same else "OTHER BITS"
            print(f"{name:8} {options.steps} steps, leave {leave}, enter {enter} per step: {verdict}", flush=True)
    return int(failed)


async def _train(
    config: Config, cluster: Cluster, release: Release, num_steps: int, folder: Path
) -> tuple[tuple[list[Any], list[Metrics]], tuple[list[float], list[float]]]:
    """((state of each rank, metrics of each step), (seconds to leave, seconds to enter))"""
    algorithm, sampling = config.trainer.algorithm, config.generator.sampling_params
    goal = objective(algorithm, sampling, config.trainer.policy.megatron_config.logprobs_chunk_size)
    processes = await launch_policy(config.trainer, cluster, goal, 2 * num_steps, str(folder / "logs"))
    policy, metrics = processes.policy, []
    leaving: list[float] = []
    entering: list[float] = []
    try:
        await release.leave(policy, WEIGHTS, OPTIMIZER)
        for step in range(num_steps):
            entering.append((await release.enter(policy, WEIGHTS, OPTIMIZER)).seconds)
            shards = Shards(_batches(config, policy.dp_size, step))
            await policy.keep_old_logprobs(shards)
            metrics.append((await policy.update(shards, None, 1))[0])
            started = time.perf_counter()
            await release.leave(policy, OPTIMIZER)
            await release.leave(policy, WEIGHTS)
            leaving.append(time.perf_counter() - started)
        await release.enter(policy, WEIGHTS, OPTIMIZER)
        await policy.save_state(str(folder / "state"))
        files = sorted((folder / "state").iterdir())
        states = [torch.load(file, weights_only=True) for file in files]
        for state in states:  # nobody seeds these
            del state["random"]["python"], state["random"]["numpy"]
    finally:
        await processes.stop()
        await release.close()
    return (states, metrics), (leaving, entering)


def _batches(config: Config, dp_size: int, step: int) -> list[TrainBatch]:
    """Random samples of this step, the same in every mode."""
    trainer = config.trainer
    shape = AutoConfig.from_pretrained(trainer.policy.model.path)
    generator = torch.Generator().manual_seed(step)

    def sample() -> Sample:
        tokens = torch.randint(shape.vocab_size, (TOKENS,), generator=generator)
        mask = torch.arange(TOKENS) >= 4
        reward = float(torch.rand((), generator=generator))
        return Sample(tokens, mask, torch.zeros(TOKENS), 4, reward, "length", 1, step)

    prompts = [Prompt(str(index), [], "none", {}, "none") for index in range(PROMPTS)]
    groups = [Group(prompt, tuple(sample() for _ in range(SAMPLES))) for prompt in prompts]
    return split(
        build_experience(groups, advantage(trainer.algorithm)),
        micro_batch_rules(trainer, shape, dp_size),
        num_mini_batches=2,
        reduction=trainer.algorithm.loss_reduction,
        max_generate_length=TOKENS,
    )


def _equal(mine: Any, theirs: Any) -> bool:
    if isinstance(mine, torch.Tensor):
        return torch.equal(mine, theirs)
    if isinstance(mine, dict):
        return mine.keys() == theirs.keys() and all(_equal(mine[key], theirs[key]) for key in mine)
    if isinstance(mine, list | tuple):
        return len(mine) == len(theirs) and all(map(_equal, mine, theirs))
    return bool(mine == theirs)


def _tiny_model(folder: Path) -> Path:
    torch.manual_seed(0)
    Qwen3ForCausalLM(model_config()).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


if __name__ == "__main__":
    sys.exit(main())
