"""What an engine is told, and what vLLM is told of it.

Imports no vLLM: settings are made in other processes, and the environment must be set before vLLM is imported.
"""

from __future__ import annotations

import getpass
import logging
import os
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.policy import LoraConfig
from skyrl_train.hf.adapter import SLOT_RANKS, linear_shapes, slot_problem, targets

log = logging.getLogger(__name__)

PauseMode = Literal["keep", "wait", "abort"]
EXTENSION = "skyrl_train.engines.vllm.worker.transfer.SyncExtension"
SCHEDULER = "skyrl_train.engines.vllm.whole_logprobs.scheduler"
ADAPTER = "skyrl_adapter"
"""Key of vLLM's additional_config."""
NUM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
"""Of a number of each `model_dtype`."""


@dataclass(frozen=True)
class Margin:
    """What an engine leaves of the memory that it finds free on each of its devices when it starts."""

    share: float = 0.1
    """Part of what is free, at least: vLLM's own CUDA context and NCCL, and the buffers in which weights arrive."""
    scored_tokens: int = 0
    """Of the longest sample whose logprobs it will be asked for."""
    for_trainers: int = 0
    """Bytes besides, that trainers on the same devices may come to hold while the engine generates."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What an engine of any kind is told: its configuration, and what only the run knows."""

    generator: GeneratorConfig
    """weight_sync_backend is what was chosen for auto."""
    index: int
    """Among the engines; decides its port, or which server it is."""
    model_path: str
    """Folder with the checkpoint, its config and its tokenizer."""
    served_model_name: str
    max_model_len: int
    """Most tokens of prompt and response together."""
    seed: int
    rpc_timeout_s: float
    """Deadline of calls that wait for requests."""
    api_key: str | None = field(default=None, repr=False)
    """Of a server that runs already."""
    advertised_host: str | None = None
    """Address for others to use where the endpoint listens on all networks; None means this host's name."""
    margin: Margin = Margin()
    enable_sleep_mode: bool = False
    """Whether the engine will be asked to sleep; without a GPU it can always be asked, and nothing is freed."""
    cached_sequences: int | None = None
    """Where nothing else sizes the KV cache: no more sequences of max_model_len find room in it; None for no limit."""
    lora: LoraConfig | None = None
    """With it every request carries the policy's adapter, which the weight sync brings."""
    lora_seed: int = 0
    """Of the adapter before the first sync, which changes nothing."""
    custom_modules: tuple[str, ...] = ()
    """`trainer.custom_modules`, imported before the engine is built."""

    @property
    def url(self) -> str:
        """Of a server that runs already: "http://host:port", without a path."""
        return self.generator.remote_inference_engine_urls[self.index]

    @property
    def tensor_parallel_size(self) -> int:
        return self.generator.inference_engine_tensor_parallel_size

    def changed(self, **keys: Any) -> EngineSettings:
        """With other values of these keys of `generator`."""
        return replace(self, generator=replace(self.generator, **keys))


def engine_arguments(settings: EngineSettings, device_type: str) -> dict[str, Any]:
    """Keyword arguments of vLLM's AsyncEngineArgs.

    Raises: ValueError without a GPU and without a size of the KV cache.
    """
    generator = settings.generator
    if device_type == "cpu" and generator.kv_cache_memory_gb is None:
        raise ValueError(
            "generator.kv_cache_memory_gb is not set; without a GPU every engine would claim most of all memory. Set "
            "it, for example to 0.25"
        )
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "served_model_name": settings.served_model_name,
        "dtype": generator.model_dtype,
        "max_model_len": settings.max_model_len,
        "seed": settings.seed,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "enforce_eager": is_eager(settings, device_type),
        "enable_prefix_caching": generator.enable_prefix_caching,
        "max_num_batched_tokens": max(generator.max_num_batched_tokens, settings.max_model_len),
        "max_num_seqs": generator.max_num_seqs,
        "logprobs_mode": "processed_logprobs",
        # Else requests over HTTP take top_k, repetition_penalty and others from the model's generation_config.json.
        "generation_config": "vllm",
        "weight_transfer_config": {"backend": "skyrl"},
        "worker_extension_cls": EXTENSION,
        "scheduler_cls": SCHEDULER,
        "disable_log_stats": True,
        "enable_log_requests": False,
        "use_tqdm_on_load": False,
    }
    if settings.enable_sleep_mode and device_type == "cuda":  # vLLM refuses it elsewhere
        arguments["enable_sleep_mode"] = True
    if generator.gpu_memory_utilization is not None:
        arguments["gpu_memory_utilization"] = generator.gpu_memory_utilization
    if generator.kv_cache_memory_gb is not None:
        arguments["kv_cache_memory_bytes"] = int(generator.kv_cache_memory_gb * 2**30)
    if settings.lora is not None:
        arguments |= lora_arguments(settings.model_path, settings.lora, settings.lora_seed)
    if settings.tensor_parallel_size > 1:
        arguments["distributed_executor_backend"] = "mp"
    return arguments | generator.engine_init_kwargs


def is_eager(settings: EngineSettings, device_type: str) -> bool:
    """Whether the engine runs without CUDA graphs and without compilation."""
    chosen = settings.generator.enforce_eager
    return device_type == "cpu" if chosen is None else chosen


def seeds_requests(settings: EngineSettings, device_type: str) -> bool:
    """Whether each request has its own seed. vLLM samples such requests one by one, which on a GPU takes launches."""
    chosen = settings.generator.seed_requests
    return device_type == "cpu" if chosen is None else chosen


def still_running(timeout_s: float, requests: Sequence[str] = ()) -> TimeoutError:
    """What to raise where a pause of the mode "wait" does not come to its end. Args: requests: their names if known."""
    named = ", ".join(requests[:4]) + (f" and {len(requests) - 4} more" if len(requests) > 4 else "")
    return TimeoutError(
        f"requests {f'({named}) ' if named else ''}still run after trainer.timeout_s={timeout_s:g} s, and "
        "generator.pause_mode=wait lets them end before a weight sync: have clients ask for less (max_tokens), raise "
        "trainer.timeout_s, or set generator.pause_mode to keep or abort"
    )


def lora_arguments(model_path: str, lora: LoraConfig, seed: int) -> dict[str, Any]:
    """One slot, in the layers that are adapted and no others: vLLM (0.32) cannot score prompts where the head has one.

    Raises: ValueError for what vLLM has no slots for, or targets that match nothing.
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
        # What the workers need to know of it; adapter_slots.py reads it.
        "additional_config": {ADAPTER: {"lora": asdict(lora), "seed": seed}},
    }


def engine_environment(settings: EngineSettings, device_type: str) -> dict[str, str]:
    """Environment variables that must be set before the first `import vllm`, and that its processes inherit."""
    environment = {
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_LOGGING_LEVEL": "ERROR",
        # The death of the core reaches waiting requests after this time (vLLM 0.32: 6 to 11 s with its default).
        "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS": "1",
        # The worker lives in the core's process: one process and its start-up less (tensor parallelism asks for "mp").
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    }
    if device_type == "cuda" and settings.generator.model_dtype == "float32":
        # vLLM's attention leaves the precision of its products to Triton, whose own default is TensorFloat-32.
        environment["TRITON_F32_DEFAULT"] = "ieee"
    if not is_eager(settings, device_type):
        # torch's own place, which would go with the engine's temporary folder.
        environment["TORCHINDUCTOR_CACHE_DIR"] = f"{tempfile.gettempdir()}/torchinductor_{_user()}"
    if Path(settings.model_path).is_dir():
        environment["HF_HUB_OFFLINE"] = "1"
    if device_type == "cpu":
        environment |= {
            # Two threads that spin on busy cores took 22 s for what one did in 1.8 s.
            "OMP_NUM_THREADS": "1",
            # "auto" pins cores, on which engines and trainers then collide.
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        }
        if is_eager(settings, device_type):
            # vLLM compiles a function of the sampler (8 s) on the first request with logprobs, eager mode or not.
            environment["TORCHDYNAMO_DISABLE"] = "1"
    return environment


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container's user id without a name
        return f"uid_{os.getuid()}"


CLOSED = {
    # Opens /collective_rpc, /pause, /sleep and the weight updates of vLLM's own to every client.
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
"""vLLM's variables that open more than this program offers -> the value that closes it; None removes the variable."""


def set_environment(settings: EngineSettings, device_type: str) -> None:
    """Set `engine_environment` where the user has set nothing, and CLOSED whatever an engine inherits."""
    for name, value in engine_environment(settings, device_type).items():
        os.environ.setdefault(name, value)
    for name, closed in CLOSED.items():
        if os.environ.get(name, closed) != closed:
            log.warning("%s is set: engines of this program ignore it", name)
        os.environ.pop(name, None)
        if closed is not None:
            os.environ[name] = closed
