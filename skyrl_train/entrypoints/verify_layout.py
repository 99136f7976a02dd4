"""Check that a parallel layout computes what Hugging Face computes, before thousands of GPU hours go into it.

    python -m skyrl_train.entrypoints.verify_layout [+experiment=NAME] trainer.policy.model.path=PATH [key=value ...]

One mini-batch of random tokens goes through the model under the layout of trainer.policy.megatron_config, under one
process (or verify.against), and through Hugging Face's own model, in processes of this machine (one GPU each, or CPU).
The tables show the differences of gradients, logprobs and metrics. With verify.against above one process, Hugging Face
is compared with the model made small only. All weights are trained, by the policy's loss: moe_aux_loss_coeff,
freeze_moe_router and lora are left out.
Exit code: 0 exact, 1 not exact, 2 the model or layout cannot work, or a process of it failed.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.table import Table

from skyrl_train.checks.model import cut_problems
from skyrl_train.checks.training import MODEL, POLICY, layout_problems
from skyrl_train.config import ConfigError
from skyrl_train.config.policy import OWN_STAGES, Layout, MegatronConfig
from skyrl_train.config.rl import VERIFY, VerifyLayoutConfig
from skyrl_train.entrypoints.command import guarded
from skyrl_train.hf.transformer_config import pinned_problems
from skyrl_train.megatron.verify.outcome import BFLOAT16, FLOAT32, Difference, Outcome, compare
from skyrl_train.tracking.writable import require_file
from skyrl_train.types import Metrics

if TYPE_CHECKING:
    from skyrl_train.megatron.verify.trial import Trial

SHOWN_TENSORS = 12
HUGGING_FACE = "Hugging Face"
AGAINST = "verify.against"
LEFT_OUT: dict[str, Any] = {"moe_aux_loss_coeff": 0.0, "freeze_moe_router": False}
"""Settings of training that Hugging Face's reference does not have, and the values that the layouts have instead."""


def main(argv: Sequence[str]) -> int:
    """Run what the command line asks for and return the exit code."""
    # An error must not end as "not exact". RuntimeError: a rank failed, with its traceback; OSError: no such file.
    errors = (ValueError, RuntimeError, OSError)
    return guarded(lambda: verify(VERIFY.read(argv or ["--help"]), Console()), Console(stderr=True), errors)


def checked_layouts(config: VerifyLayoutConfig) -> tuple[Layout, Layout]:
    """The layout and the one to compare with. Raises: ConfigError with everything that cannot work."""
    megatron = replace(config.trainer.policy.megatron_config, **LEFT_OUT)
    against = dataclasses.asdict(config.verify.against)
    against_ranks = against.pop("num_ranks")
    kwargs = {name: value for name, value in megatron.transformer_config_kwargs.items() if name not in OWN_STAGES}
    other = replace(megatron, **against, transformer_config_kwargs=kwargs)
    problems: list[str] = []
    layouts = []
    for layout, num_ranks, path, ranks_key in (
        (megatron, config.verify.num_ranks, POLICY, "verify.num_ranks"),
        (other, against_ranks, AGAINST, f"{AGAINST}.num_ranks"),
    ):
        world_size = num_ranks or _fewest_ranks(layout)
        problems += layout_problems(layout, path, world_size, ranks_key)
        problems += cut_problems(config.trainer.policy.model.path, MODEL, layout, path)
        problems += pinned_problems(f"{POLICY}.transformer_config_kwargs", layout.transformer_config_kwargs)
        problems += _device_problems(world_size, path)
        layouts.append(Layout(layout, world_size))
    if problems:
        raise ConfigError(list(dict.fromkeys(problems)))
    return layouts[0], layouts[1]


def _left_out(config: VerifyLayoutConfig) -> list[str]:
    """Keys of settings that are not compared."""
    policy = config.trainer.policy
    names = [name for name, value in LEFT_OUT.items() if getattr(policy.megatron_config, name) != value]
    return [f"{POLICY}.{name}" for name in names] + ["trainer.policy.model.lora"] * (policy.model.lora.rank > 0)


def _fewest_ranks(megatron: MegatronConfig) -> int:
    """Processes of the fewest data-parallel copies over which the experts can be distributed."""
    layout = Layout(megatron, num_ranks=0)
    return layout.pp * math.lcm(layout.tp * layout.cp, layout.ep * layout.etp)


def _device_problems(world_size: int, path: str) -> Iterator[str]:
    if torch.cuda.is_available() and torch.cuda.device_count() < world_size:
        yield (
            f"{path} needs {world_size} processes with a GPU each: this machine has {torch.cuda.device_count()}. Lower "
            "the sizes, or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on the CPU"
        )


def verify(config: VerifyLayoutConfig, console: Console) -> int:
    """Run both layouts and Hugging Face, print the tables; 0 if all agree, 1 if not."""
    layout, against = checked_layouts(config)
    # Imported here, so that a wrong configuration is reported at once.
    from skyrl_train.checks.model_folder import checked_folder
    from skyrl_train.megatron.verify import layout_check
    from skyrl_train.megatron.verify.hf_reference import comparable, run_hugging_face

    settings = config.verify
    require_file("verify.json_file", settings.json_file)
    _, model = checked_folder(MODEL, config.trainer.policy.model.path, config.trainer.download_timeout_s)
    torch.set_num_threads(1)  # the processes are forked from this one where there is no GPU
    trial = _trial(config, model.vocab_size)
    num_tokens, limit = int(trial.experience.cu_seqlens[-1]), settings.max_tokens_per_microbatch

    def run(asked: Layout, max_tokens: int) -> Outcome:
        with console.status(f"one mini-batch in {asked.num_ranks} process(es)"):
            split = layout_check.Layout(asked.megatron, asked.num_ranks, max_tokens)
            return layout_check.run_layout(trial, split, timeout_s=settings.timeout_s)

    reference = run(against, num_tokens if against.num_ranks == 1 else limit)
    outcome = run(layout, limit)
    differences = {against.sizes: compare(outcome, reference)}
    if against.num_ranks == 1:
        with console.status("one mini-batch through Hugging Face"):
            hugging_face = run_hugging_face(trial, timeout_s=settings.timeout_s)
        differences[HUGGING_FACE] = compare(comparable(outcome, hugging_face), hugging_face)
    bounds = BFLOAT16 if trial.bf16 else FLOAT32
    broken = [f"{sentence} from {name}" for name, each in differences.items() for sentence in bounds.exceeded(each)]
    if left_out := _left_out(config):
        console.print(f"left out of the comparison: {', '.join(left_out)}", highlight=False, soft_wrap=True)
    for name, difference in differences.items():
        console.print(_table(f"{layout.sizes} against {name}", difference, outcome.metrics))
    if settings.json_file is not None:
        numbers = {name: dataclasses.asdict(each) for name, each in differences.items()}
        Path(settings.json_file).write_text(json.dumps({"exact": not broken, "broken": broken} | numbers, indent=1))
    if broken:
        console.print("[bold red]not exact:[/] " + "; ".join(broken), highlight=False, soft_wrap=True)
        return 1
    console.print("[bold green]exact[/] up to rounding", highlight=False)
    return 0


def _table(title: str, difference: Difference, metrics: Metrics) -> Table:
    table = Table("", "difference", title=title)
    table.add_row(f"gradient, all {len(difference.tensors)} tensors", f"{difference.gradient:.1e}")
    worst = sorted(difference.tensors.items(), key=lambda item: -item[1])[:SHOWN_TENSORS]
    for name, error in worst:
        table.add_row(f"  {name}", f"{error:.1e}")
    if len(worst) < len(difference.tensors):
        table.add_row(f"  {len(difference.tensors) - len(worst)} more", f"at most {worst[-1][1]:.1e}")
    table.add_row("logprobs, over the largest", f"{difference.logprobs:.1e}")
    for name in ("policy/final_loss", "policy/grad_norm"):
        table.add_row(f"{name} ({metrics[name]:.6f})", f"{difference.metrics[name]:.1e}")
    table.add_row("metrics, largest", f"{difference.worst_metric[1]:.1e}")
    return table


def _trial(config: VerifyLayoutConfig, vocab_size: int) -> Trial:
    """Random tokens with long and short responses."""
    from skyrl_train.megatron.verify.trial import random_trial

    fractions = torch.rand(config.verify.num_samples, generator=torch.Generator().manual_seed(0)).square()
    lengths = (2 + fractions * (config.verify.max_length - 2)).long()
    prompts = (lengths // 4).clamp(min=1)
    path, bf16 = config.trainer.policy.model.path, config.trainer.bf16
    return random_trial(path, lengths.tolist(), prompts.tolist(), vocab_size, temperature=0.9, bf16=bf16)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
