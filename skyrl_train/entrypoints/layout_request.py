"""The command line of verify_layout: which two layouts of which model it compares, and on how large a mini-batch."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from skyrl_train.checks.model import cut_problems
from skyrl_train.checks.training import layout_problems
from skyrl_train.config import ConfigError, load_config
from skyrl_train.config.policy import MegatronConfig
from skyrl_train.spelling import nearest

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
    "impl": "layers: auto, which is torch for float32, torch or transformer_engine (auto)",
    "dtype": "float32 or bfloat16, with wider bounds (float32)",
    "samples": "samples of the mini-batch (16)",
    "max_length": "tokens of the longest sample (128)",
    "micro_batch_tokens": "tokens of a micro-batch of the asked layout (256)",
    "timeout_s": "seconds that each run may take (600)",
    "json": "file for all numbers",
}
PATH = "trainer.policy.megatron_config"


@dataclass(frozen=True, slots=True)
class AskedLayout:
    """A layout that its model allows and this machine has the devices for."""

    megatron: MegatronConfig
    world_size: int

    @property
    def name(self) -> str:
        """Its sizes above 1, such as TP2 DP2."""
        sizes = {name: getattr(self.megatron, key) or 1 for name, (key, _) in SIZES.items() if name != "etp"}
        if self.megatron.expert_model_parallel_size > 1 and self.megatron.expert_tensor_parallel_size is not None:
            sizes["etp"] = self.megatron.expert_tensor_parallel_size
        sizes["dp"] = self.world_size // _copy(self.megatron)
        shown = [f"{name.upper()}{size}" for name, size in sizes.items() if size > 1]
        return " ".join(shown) or "one process"


@dataclass(frozen=True, slots=True)
class Request:
    """A command line."""

    model: str
    layout: AskedLayout
    against: AskedLayout
    bf16: bool
    num_samples: int
    max_length: int
    micro_batch_tokens: int
    timeout_s: float
    json_file: Path | None


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
    sizes = {name: given[name] for name in (*SIZES, "dp") if name in given}
    against = dict(_split(part, ":") for part in given.get("against", "tp:1").split(","))
    foreign = [name for name in against if name not in (*SIZES, "dp")]
    if foreign:
        raise ConfigError(f"against={given['against']}: {foreign[0]} is no size; there are {', '.join((*SIZES, 'dp'))}")
    if given.get("dtype", "float32") not in ("float32", "bfloat16"):
        raise ConfigError(f"dtype={given['dtype']}: it must be float32 or bfloat16")
    return Request(
        model=given["model"],
        layout=_layout(given, sizes),
        against=_layout(given, against),
        bf16=given.get("dtype") == "bfloat16",
        num_samples=_count(given, "samples", 16),
        max_length=_count(given, "max_length", 128),
        micro_batch_tokens=_count(given, "micro_batch_tokens", 256),
        timeout_s=float(_count(given, "timeout_s", 600)),
        json_file=Path(given["json"]) if "json" in given else None,
    )


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


def _layout(given: Mapping[str, str], sizes: Mapping[str, str]) -> AskedLayout:
    """Raises: ConfigError with everything that keeps the given model from it."""
    overrides = [f"{PATH}.{SIZES[name][0]}={_count(sizes, name, 1)}" for name in sizes if name != "dp"]
    overrides.append(f"{PATH}.sequence_parallel={given.get('sp', 'true')}")
    overrides.append(f"{PATH}.transformer_impl={given.get('impl', 'auto')}")
    megatron = load_config(overrides).trainer.policy.megatron_config
    world_size = _count(sizes, "dp", _fewest_copies(megatron)) * _copy(megatron)
    problems = [
        *layout_problems(megatron, "layout", world_size, "the layout"),
        *cut_problems(given["model"], "model", megatron, "layout"),
        *_too_few_devices(world_size),
    ]
    if problems:
        raise ConfigError(problems)
    return AskedLayout(megatron, world_size)


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
