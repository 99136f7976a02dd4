"""Settings of an engine of any kind; vLLM's arguments and environment variables. Imports no vLLM: settings are built in
other processes, and the environment must be set before vLLM is imported.
"""

from __future__ import annotations

import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.policy import LoraConfig
from skyrl_train.engines.graphs import graph_arguments
from skyrl_train.hf.adapter import SLOT_RANKS, linear_shapes, slot_problem, targets
from skyrl_train.ranks import free_port

log = logging.getLogger(__name__)

PauseMode = Literal["keep", "wait", "abort"]
EXTENSION = "skyrl_train.engines.vllm.worker.transfer.SyncExtension"
SCHEDULER = "skyrl_train.engines.vllm.scheduling.scheduler.scheduler"
ADAPTER, OWN_KV_CACHE = "skyrl_adapter", "skyrl_own_kv_cache"
"""Keys of vLLM's additional_config."""
NUM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Bytes per element of each `model_dtype`."""
ONLINE = {"fp8": "fp8_per_channel"}
"""vLLM's name of each `quantization`: one scale per row of a weight, and one per token, taken while it computes. Its
`fp8` has one scale per matrix, is deprecated for online quantisation (0.32) and does not run without a GPU.
"""
ROUTER = "gate$"
"""Linear layers that quantised engines keep in the model's dtype, because their errors select other experts."""


@dataclass(frozen=True)
class Margin:
    """Memory that an engine leaves free on each of its devices when it starts."""

    share: float = 0.1
    """Minimum fraction of the free memory: vLLM's CUDA context and NCCL, and the buffers of arriving weights."""
    scored_tokens: int = 0
    """Tokens of the longest sample that the engine will score."""
    for_trainers: int = 0
    """Additional bytes for trainers that share the devices, while the engine generates."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """The configuration of an engine of any kind, and what only the run knows."""

    generator: GeneratorConfig
    """weight_sync_backend is resolved (never auto)."""
    index: int
    """Index of the engine; selects its port, or its server."""
    model_path: str
    model_key: str = "trainer.policy.model.path"
    """Folder with checkpoint, config and tokenizer, and its key for errors."""
    served_model_name: str
    max_model_len: int
    """Maximum number of tokens of prompt and response together."""
    seed: int
    rpc_timeout_s: float
    """Timeout in seconds of calls that wait for requests."""
    api_key: str | None = field(default=None, repr=False)
    """API key of a running server."""
    advertised_host: str | None = None
    """Host in the endpoint's URL if it listens on all networks; None: this host's name."""
    margin: Margin = Margin()
    enable_sleep_mode: bool = False
    """Whether the engine will sleep; without a GPU it always can, and frees nothing."""
    cached_sequences: int | None = None
    """Sequences of max_model_len that the KV cache needs to hold, if no key sets its size; None for no limit."""
    lora: LoraConfig | None = None
    """If set, the weight sync sends adapters, and every request uses the policy's adapter."""
    custom_modules: tuple[str, ...] = ()
    trust_remote_code: bool = False
    """Keys of the same name below `trainer`; the modules are imported before the engine is built."""

    @property
    def url(self) -> str:
        """URL of a running server, "http://host:port"."""
        return self.generator.remote_inference_engine_urls[self.index]

    @property
    def tensor_parallel_size(self) -> int:
        return self.generator.inference_engine_tensor_parallel_size

    def changed(self, **keys: Any) -> EngineSettings:
        """A copy with other values for these keys of `generator`."""
        return replace(self, generator=replace(self.generator, **keys))


def require_cache_size(generator: GeneratorConfig, device_type: str) -> None:
    """Raises: ValueError without a GPU and a size of the KV cache."""
    if device_type == "cpu" and generator.kv_cache_memory_gb is None:
        raise ValueError(
            "generator.kv_cache_memory_gb is null: without a GPU every engine would claim most of the host's memory. "
            "Set it, for example to 0.25"
        )


def engine_arguments(settings: EngineSettings, device_type: str) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs. Raises: ValueError without a GPU and a size of the KV cache."""
    generator = settings.generator
    require_cache_size(generator, device_type)
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "served_model_name": settings.served_model_name,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": generator.model_dtype,
        "max_model_len": settings.max_model_len,
        "seed": settings.seed,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": is_eager(settings, device_type),
        "enable_prefix_caching": generator.enable_prefix_caching,
        "max_num_batched_tokens": batched_tokens(settings),
        "max_num_seqs": generator.step_sequences,
        "logprobs_mode": "processed_logprobs",
        # Requests over HTTP would take top_k, repetition_penalty, ... from the model's generation_config.json.
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": "skyrl"},
        "worker_extension_cls": EXTENSION,
        "scheduler_cls": SCHEDULER,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "enable_sleep_mode": settings.enable_sleep_mode and device_type == "cuda",  # which vLLM rejects elsewhere
        "use_tqdm_on_load": False,
    }
    if device_type == "cpu":  # vLLM (0.32) dies there when it splits the prompt of a request with its own seed
        arguments["enable_chunked_prefill"] = False
    if not arguments["enforce_eager"]:
        sequences, tokens = generator.step_sequences, arguments["max_num_batched_tokens"]
        arguments |= graph_arguments(sequences, tokens, generator.engine_init_kwargs)
    if generator.quantization is not None:
        arguments |= quantised(generator.quantization)
    if generator.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = generator.gpu_memory_utilization
    if generator.kv_cache_memory_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(generator.kv_cache_memory_gb * 2**30)
    if settings.lora is not None:
        arguments |= lora_arguments(settings.model_path, settings.lora)
    if not generator.recompute_kv_cache and not settings.enable_sleep_mode:  # which discards the cache
        arguments["additional_config"] = {**arguments.get("additional_config", {}), OWN_KV_CACHE: True}
    if settings.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    return arguments | generator.engine_init_kwargs


def batched_tokens(settings: EngineSettings) -> int:
    """The most tokens of one step: what was asked, or what its requests can have, but at least `max_model_len`.

    vLLM's warm-up divides them among dummy requests and gives the rest of the division to one of them. One longer than
    `max_model_len` reads beyond its block table: an illegal memory access at some starts (0.26, vllm#49751).
    """
    sequences = settings.generator.step_sequences
    longest = settings.generator.engine_init_kwargs.get("max_model_len", settings.max_model_len)
    tokens = min(settings.generator.step_tokens, sequences * longest)
    return max(tokens - tokens % min(sequences, tokens), longest)


def quantised(quantization: str) -> dict[str, Any]:
    """Arguments of vLLM for engines that are quantised as their weights arrive."""
    return {
        "quantization": ONLINE[quantization],
        "quantization_config": {"ignore": [f"re:.*{ROUTER}"]},
        # The kernel of experts that it prefers on Hopper holds tensors that a reload replaces, and CUDA graphs read the
        # old ones (0.26, vllm#41670).
        "moe_backend": "triton",
    }


def is_eager(settings: EngineSettings, device_type: str) -> bool:
    """Whether the engine runs without CUDA graphs and without compilation."""
    chosen = settings.generator.enforce_eager
    return device_type == "cpu" if chosen is None else chosen


def seeds_requests(settings: EngineSettings, device_type: str) -> bool:
    """Whether each request has its own seed. vLLM samples such requests one by one, which costs launches on a GPU."""
    chosen = settings.generator.seed_requests
    return device_type == "cpu" if chosen is None else chosen


def still_running(timeout_s: float, requests: Sequence[str] = ()) -> TimeoutError:
    """Error of a pause of the mode "wait" that timed out. Args: requests: their names if known."""
    named = ", ".join(requests[:4]) + (f" and {len(requests) - 4} more" if len(requests) > 4 else "")
    return TimeoutError(
        f"requests {f'({named}) ' if named else ''}still run after trainer.timeout_s={timeout_s:g} s, and "
        "generator.pause_mode=wait lets them finish before a weight sync. Have clients request fewer tokens "
        "(max_tokens), raise trainer.timeout_s, or set generator.pause_mode to keep or abort"
    )


def room_to_answer(prompt_length: int, max_model_len: int) -> int:
    """Tokens that a response may have. Raises: ValueError if none."""
    if not 0 < prompt_length < max_model_len:
        raise ValueError(
            f"a prompt of {prompt_length} tokens does not fit an engine of {max_model_len} tokens; lower "
            "generator.max_input_length or trainer.max_prompt_length"
        )
    return max_model_len - prompt_length


def lora_arguments(model_path: str, lora: LoraConfig) -> dict[str, Any]:
    """One slot in each adapted layer and no other: vLLM (0.32) cannot score prompts if the output head has a slot.
    Raises: ValueError for ranks or modules that vLLM has no slots for, or targets that match nothing.
    """
    modules = targets(linear_shapes(model_path), lora)
    if problem := slot_problem(lora.rank, modules):
        raise ValueError(problem)
    names = {name.rpartition(".")[2] for name in modules}
    if any(".experts." in name for name in modules):
        names.add("experts")
    return {
        "enable_lora": True,
        "lora_target_modules": sorted(names),
        "max_loras": 1,
        "max_cpu_loras": 1,
        "max_lora_rank": min(rank for rank in SLOT_RANKS if rank >= lora.rank),
        # Read by the workers, in adapter_slots.py.
        "additional_config": {ADAPTER: asdict(lora)},
    }


def engine_environment(settings: EngineSettings, device_type: str) -> dict[str, str]:
    """Environment variables that must be set before the first `import vllm`, and that its processes inherit."""
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # Requests fail this long after the core died (vLLM 0.32: 6 to 11 s by default).
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        # Run the worker in the core's process: saves starting a process (tensor parallelism sets "mp").
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        # Where it looks for ports. Left to itself it takes one that the system may give away before it listens.
        "VLLM_PORT": str(free_port()),
    }
    if device_type == "cuda" and settings.generator.model_dtype == "float32":
        # vLLM's attention uses Triton's default precision, which is TensorFloat-32.
        environment["TRITON_F32_DEFAULT"] = "ieee"
    if not is_eager(settings, device_type):
        # torch's default folder, which would otherwise be in (and removed with) the engine's temporary folder.
        folder = f"{tempfile.gettempdir()}/torchinductor_{os.getuid()}"
        # Where it compiles a model vLLM has Triton write its kernels to another folder than it has it read them from
        # where it loads what it compiled: the next start compiled its sampler again, 10 s on a slow host.
        environment |= {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": f"{folder}/triton"}
    if Path(settings.model_path).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if device_type == "cpu":
        environment |= {
            # Two threads spinning on busy cores took 22 s for 1.8 s of work.
            "OMP_NUM_THREADS": "1",
            # "auto" pins engines and trainers to the same cores.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        if is_eager(settings, device_type):
            # vLLM compiles a sampler function (8 s) at the first request with logprobs, even in eager mode.
            environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment


CLOSED = {
    # Opens /collective_rpc, /pause, /sleep and vLLM's weight updates to every client.
    "VLLM_SERVER_DEV_MODE": "0",
    # Messages to the core may then be pickles, which run code.
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "0",
    # Clients may then load adapters from any path of this node.
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
    "VLLM_LORA_RESOLVER_CACHE_DIR": None,
    # A second key beside generator.http_api_key.
    "VLLM_API_KEY": None,
    # These write requests, answers or every call of a function into logs and files.
    "VLLM_DEBUG_LOG_API_SERVER_RESPONSE": "0",
    "VLLM_DEBUG_DUMP_PATH": None,
    "VLLM_TRACE_FUNCTION": "0",
}
"""vLLM variables that open more than this program offers -> the value that closes it; None removes the variable."""


def set_environment(settings: EngineSettings, device_type: str) -> None:
    """Set variables of `engine_environment` that are unset, and override those of CLOSED."""
    for name, value in engine_environment(settings, device_type).items():
        os.environ.setdefault(name, value)
    for name, closed in CLOSED.items():
        if os.environ.get(name, closed) != closed:
            log.warning("%s in the environment is ignored by the engine", name)
        os.environ.pop(name, None)
        if closed is not None:
            os.environ[name] = closed
