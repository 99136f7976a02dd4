"""Check that a parallel layout computes what one process computes, before thousands of GPU hours go into it.

    python -m skyrl_train.entrypoints.verify_layout model=PATH tp=2 pp=2 [vpp= cp= ep= etp= dp= sp= json=FILE ...]

One mini-batch of random tokens goes through the model at PATH under the asked layout and under one process, in
processes of this machine (one GPU each, or CPU). The table says how far gradients, logprobs and metrics are apart.
Exit code: 0 exact, 1 not exact, 2 the layout cannot work or a process of it failed.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from skyrl_train.algorithms.losses import LossSettings
from skyrl_train.algorithms.objective import Objective
from skyrl_train.checks.model import cut_problems
from skyrl_train.checks.training import layout_problems
from skyrl_train.config import ConfigError, load_config
from skyrl_train.config.errors import nearest
from skyrl_train.config.policy import MegatronConfig
from skyrl_train.megatron.outcome import BFLOAT16, FLOAT32, Difference, compare
from skyrl_train.types import ExperienceBatch, Metrics

if TYPE_CHECKING:
    from skyrl_train.megatron.layout_check import Trial

SIZES = {
    "tp": ("tensor_model_parallel_size", "tensor parallelism"),
    "pp": ("pipeline_model_parallel_size", "pipeline stages"),
    "vpp": ("virtual_pipeline_model_parallel_size", "model chunks per stage (interleaved schedule)"),
    "cp": ("context_parallel_size", "context parallelism"),
    "ep": ("expert_model_parallel_size", "expert parallelism"),
    "etp": ("expert_tensor_parallel_size", "expert-tensor parallelism, tp if not given"),
}
OPTIONS = {
    "model": "folder of a Hugging Face checkpoint",
    **{name: text for name, (_, text) in SIZES.items()},
    "dp": "data parallelism, the smallest that fits if not given",
    "sp": "sequence parallelism where tp > 1 (true)",
    "against": "sizes of the layout to compare with, such as tp:4,pp:2, where one process cannot hold the model (tp:1)",
    "impl": "layers: auto, torch or transformer_engine (auto)",
    "dtype": "float32 or bfloat16, with wider bounds (float32)",
    "samples": "samples of the mini-batch (16)",
    "max_length": "tokens of the longest sample (128)",
    "micro_batch_tokens": "tokens of a micro-batch of the asked layout (256)",
    "timeout_s": "seconds that each run may take (600)",
    "json": "file for all numbers",
}
SHOWN_TENSORS = 12
PATH = "trainer.policy.megatron_config"


@dataclass(frozen=True, slots=True)
class Request:
    """A command line."""

    model: str
    layout: MegatronConfig
    world_size: int
    against: MegatronConfig
    against_world_size: int
    bf16: bool
    num_samples: int
    max_length: int
    micro_batch_tokens: int
    timeout_s: float
    json_file: Path | None


def main(argv: Sequence[str]) -> int:
    console = Console()
    if not argv or {"-h", "--help"} & set(argv):
        console.print(__doc__, markup=False, highlight=False)
        for name, text in OPTIONS.items():
            console.print(f"  {name + '=':20}{text}", markup=False, highlight=False)
        return 0
    try:
        request = read_request(argv)
        return verify(request, console)
    # RuntimeError: a rank that failed, with its traceback. It must not end as "not exact".
    except (ValueError, RuntimeError) as error:
        Console(stderr=True).print(f"[bold red]error:[/] {escape(str(error))}", highlight=False, soft_wrap=True)
        return 2


def read_request(argv: Sequence[str]) -> Request:
    """Raises: ConfigError with everything that keeps the layouts from working."""
    given = dict(_split(argument) for argument in argv)
    unknown = [name for name in given if name not in OPTIONS]
    if unknown:
        near = nearest(unknown[0], OPTIONS)
        hint = f"; did you mean {near}?" if near else f"; there are {', '.join(OPTIONS)}"
        raise ConfigError(f"{unknown[0]}= is no option{hint}")
    if "model" not in given:
        raise ConfigError("model=PATH is missing: the folder of a Hugging Face checkpoint")
    common: dict[str, str] = {name: given[name] for name in ("sp", "impl") if name in given}
    sizes = {name: given[name] for name in (*SIZES, "dp") if name in given}
    against = dict(_split(part, ":") for part in given.get("against", "tp:1").split(","))
    foreign = [name for name in against if name not in (*SIZES, "dp")]
    if foreign:
        raise ConfigError(f"against={given['against']}: {foreign[0]} is no size; there are {', '.join((*SIZES, 'dp'))}")
    layout, world_size = _layout(given["model"], sizes, common)
    other, other_world_size = _layout(given["model"], against, common)
    if given.get("dtype", "float32") not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype={given['dtype']}: it must be float32 or bfloat16")
    return Request(
        model=given["model"],
        layout=layout,
        world_size=world_size,
        against=other,
        against_world_size=other_world_size,
        bf16=given.get("dtype") == "bfloat16",
        num_samples=_count(given, "samples", 16),
        max_length=_count(given, "max_length", 128),
        micro_batch_tokens=_count(given, "micro_batch_tokens", 256),
        timeout_s=float(_count(given, "timeout_s", 600)),
        json_file=Path(given["json"]) if "json" in given else None,
    )


def verify(request: Request, console: Console) -> int:
    """Run both layouts, print the table; 0 if they agree, 1 if not."""
    # Here, so that a wrong command line is answered at once.
    from skyrl_train.megatron.layout_check import Layout, run_layout

    torch.set_num_threads(1)  # the processes are forked from this one where there is no GPU
    trial = _trial(request)
    whole = int(trial.experience.cu_seqlens[-1])
    limit = whole if request.against_world_size == 1 else request.micro_batch_tokens
    with console.status(f"one mini-batch in {request.against_world_size} process(es)"):
        reference = run_layout(
            trial, Layout(request.against, request.against_world_size, limit), timeout_s=request.timeout_s
        )
    with console.status(f"one mini-batch in {request.world_size} process(es)"):
        outcome = run_layout(
            trial, Layout(request.layout, request.world_size, request.micro_batch_tokens), timeout_s=request.timeout_s
        )
    difference = compare(outcome, reference)
    broken = (BFLOAT16 if request.bf16 else FLOAT32).broken(difference)
    if request.json_file is not None:
        numbers = dataclasses.asdict(difference) | {"exact": not broken, "broken": broken}
        request.json_file.write_text(json.dumps(numbers, indent=1))
    console.print(_table(request, difference, outcome.metrics))
    if broken:
        console.print("[bold red]not exact:[/] " + "; ".join(broken), highlight=False, soft_wrap=True)
        return 1
    console.print("[bold green]exact[/] up to rounding", highlight=False)
    return 0


def _table(request: Request, difference: Difference, metrics: Metrics) -> Table:
    names = _name(request.layout, request.world_size), _name(request.against, request.against_world_size)
    table = Table("", "difference", title=" against ".join(names))
    table.add_row(f"gradient, all {len(difference.tensors)} tensors", f"{difference.gradient:.1e}")
    worst = sorted(difference.tensors.items(), key=lambda item: -item[1])[:SHOWN_TENSORS]
    for name, error in worst:
        table.add_row(f"  {name}", f"{error:.1e}")
    if len(worst) < len(difference.tensors):
        table.add_row(f"  {len(difference.tensors) - len(worst)} more", f"at most {worst[-1][1]:.1e}")
    table.add_row("logprobs, largest", f"{difference.logprobs:.1e}")
    for name in ("policy/final_loss", "policy/grad_norm"):
        table.add_row(f"{name} ({metrics[name]:.6f})", f"{difference.metrics[name]:.1e}")
    table.add_row("metrics, largest", f"{difference.worst_metric[1]:.1e}")
    return table


def _split(argument: str, sign: str = "=") -> tuple[str, str]:
    name, found, value = argument.partition(sign)
    if not found or not value:
        raise ConfigError(f"{argument!r} is not of the form name{sign}value")
    return name, value


def _count(given: Mapping[str, str], name: str, default: int) -> int:
    text = given.get(name, str(default))
    if not text.isdigit() or int(text) < 1:
        raise ConfigError(f"{name}={text}: it must be a whole number of at least 1")
    return int(text)


def _layout(model: str, sizes: Mapping[str, str], common: Mapping[str, str]) -> tuple[MegatronConfig, int]:
    """The layout and its processes. Raises: ConfigError with everything that keeps the model from it."""
    overrides = [f"{PATH}.{SIZES[name][0]}={_count(sizes, name, 1)}" for name in sizes if name != "dp"]
    overrides.append(f"{PATH}.sequence_parallel={common.get('sp', 'true')}")
    overrides.append(f"{PATH}.transformer_impl={common.get('impl', 'auto')}")
    megatron = load_config(overrides).trainer.policy.megatron_config
    world_size = _count(sizes, "dp", _fewest_copies(megatron)) * _copy(megatron)
    problems = [
        *layout_problems(megatron, "layout", world_size, "the layout"),
        *cut_problems(model, "model", megatron, "layout"),
        *_too_few_devices(world_size),
    ]
    if problems:
        raise ConfigError(problems)
    return megatron, world_size


def _copy(megatron: MegatronConfig) -> int:
    """Processes of one data-parallel copy."""
    sizes = megatron.tensor_model_parallel_size, megatron.pipeline_model_parallel_size, megatron.context_parallel_size
    return sizes[0] * sizes[1] * sizes[2]


def _fewest_copies(megatron: MegatronConfig) -> int:
    """Data-parallel copies among which the experts can be dealt."""
    etp = megatron.expert_tensor_parallel_size or megatron.tensor_model_parallel_size
    experts = megatron.expert_model_parallel_size * etp * megatron.pipeline_model_parallel_size
    return next(copies for copies in range(1, experts + 1) if _copy(megatron) * copies % experts == 0)


def _too_few_devices(world_size: int) -> Iterator[str]:
    if torch.cuda.is_available() and torch.cuda.device_count() < world_size:
        yield (
            f"the layout is {world_size} processes with a GPU each, and this machine has {torch.cuda.device_count()}: "
            "lower the sizes, or hide the GPUs with CUDA_VISIBLE_DEVICES= to run on the CPU"
        )


def _name(megatron: MegatronConfig, world_size: int) -> str:
    sizes = {name: getattr(megatron, key) or 1 for name, (key, _) in SIZES.items() if name != "etp"}
    if megatron.expert_model_parallel_size > 1 and megatron.expert_tensor_parallel_size is not None:
        sizes["etp"] = megatron.expert_tensor_parallel_size
    sizes["dp"] = world_size // _copy(megatron)
    shown = [f"{name.upper()}{size}" for name, size in sizes.items() if size > 1]
    return " ".join(shown) or "one process"


def _trial(request: Request) -> Trial:
    """Random tokens with long and short responses, a clipped policy loss, KL and entropy terms."""
    from transformers import AutoConfig

    from skyrl_train.megatron.layout_check import Trial

    generator = torch.Generator().manual_seed(0)
    vocabulary = AutoConfig.from_pretrained(request.model).vocab_size
    shares = torch.rand(request.num_samples, generator=generator).square()
    lengths = (2 + shares * (request.max_length - 2)).long()
    total = int(lengths.sum())
    position = torch.arange(total) - torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths)
    experience = ExperienceBatch(
        token_ids=torch.randint(0, vocabulary, (total,), generator=generator),
        cu_seqlens=torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).int(),
        loss_mask=position >= torch.repeat_interleave((lengths // 4).clamp(min=1), lengths),
        rollout_logprobs=torch.randn(total, generator=generator),
        rewards=torch.zeros(request.num_samples),
        advantages=torch.randn(request.num_samples, generator=generator),
        group_ids=torch.arange(request.num_samples),
    )
    return Trial(
        model_path=request.model,
        experience=experience,
        old_offsets=0.2 * torch.randn(total, generator=generator),
        ref_offsets=0.3 * torch.randn(total, generator=generator),
        objective=Objective(
            loss="regular",
            settings=LossSettings(0.2, 0.2, 3.0, 1.0, 5.0),
            kl_coef=0.1,
            kl_estimator="k3",
            entropy_coef=0.05,
            temperature=0.9,
            logprobs_chunk_size=1024,
        ),
        reduction="token_mean",
        max_generate_length=request.max_length,
        bf16=request.bf16,
    )


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
