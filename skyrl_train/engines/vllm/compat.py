"""The parts of vLLM that differ between 0.26 and 0.33."""

from __future__ import annotations

import dataclasses
import inspect
from argparse import Namespace
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from transformers import PretrainedConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader.reload import meta as _reload_meta
from vllm.outputs import CompletionOutput
from vllm.v1.engine.async_llm import AsyncLLM

from skyrl_train.device import device_type

if TYPE_CHECKING:
    from fastapi import FastAPI

NOT_RELOADED: frozenset[str] = frozenset(getattr(_reload_meta, "SKIP_LOAD_TENSORS", _reload_meta.SKIP_TENSORS))
"""Tensors that no weight loader fills during a layerwise reload; the name is SKIP_TENSORS in 0.26."""
REPORTS_VERSIONS = any(field.name == "weight_versions" for field in dataclasses.fields(CompletionOutput))
"""From 0.32 on each output says which version generated which of its tokens."""
UNNAMED_VERSION = "default"
"""vLLM's name for the weights that an engine was started with."""


def build_async_llm(arguments: dict[str, Any]) -> AsyncLLM:
    """Raises: ValueError for an argument that this version of vLLM does not have."""
    try:
        engine_args = AsyncEngineArgs(**arguments | attention_arguments(arguments))
    except TypeError as error:
        raise ValueError(f"vLLM rejects generator.engine_init_kwargs: {error}") from error
    return AsyncLLM.from_engine_args(engine_args)


def attention_arguments(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM (0.32) runs latent attention with AMX on every CPU that has it, and AMX rejects float32."""
    given = any(name in arguments for name in ("attention_backend", "attention_config"))
    if given or arguments.get("dtype") != "float32" or device_type() != "cpu":
        return {}
    values, _ = PretrainedConfig.get_config_dict(arguments["model"])
    return {"attention_backend": "CPU_MLA"} if values.get("kv_lora_rank") else {}


def shut_down(llm: AsyncLLM, num_workers: int) -> None:
    """End an engine; kill its core at once if that is the only worker. A graceful shutdown of such a core takes 3 s of
    garbage collection. Separate workers get it, because they remove the shared memory that they have named.
    """
    if num_workers == 1 and "timeout" in inspect.signature(llm.shutdown).parameters:
        llm.shutdown(timeout=0)
    else:
        llm.shutdown()


async def set_weight_version(llm: AsyncLLM, version: int) -> None:
    """Label outputs and HTTP answers with this version; 0.26 has no labels."""
    if hasattr(llm, "update_weight_version"):
        await llm.update_weight_version(str(version))


def version_starts(output: CompletionOutput) -> list[tuple[int, int]]:
    """(version, index of its first token) of a finished output. Needs REPORTS_VERSIONS."""
    spans = output.weight_versions or ()
    return [(0 if span.version == UNNAMED_VERSION else int(span.version), span.start) for span in spans]


def is_refusal_of_a_pause(error: Exception) -> bool:
    """From 0.33 on a paused engine rejects new requests in some modes; older versions queue them."""
    return type(error).__name__ == "RetryableRequestError"


def server_arguments(arguments: list[str]) -> Namespace:
    """Parse a command line of vLLM's server."""
    try:
        from vllm.entrypoints.common.cli_args import make_arg_parser  # 0.33
    except ImportError:
        try:
            from vllm.entrypoints.launchers.cli_args import make_arg_parser  # 0.29 to 0.32
        except ImportError:
            from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    return make_arg_parser(FlexibleArgumentParser()).parse_args(arguments)


async def build_openai_app(client: Any, arguments: Namespace) -> FastAPI:
    """vLLM's OpenAI-compatible application around an object with the methods of AsyncLLM."""
    try:
        from vllm.entrypoints.launchers.api_server.app_state import init_app_state  # 0.29 on
        from vllm.entrypoints.launchers.app import build_app
    except ImportError:
        from vllm.entrypoints.openai.api_server import build_app, init_app_state

    tasks = await client.get_supported_tasks()
    app = build_app(arguments, tasks, client.model_config)
    await init_app_state(client, app.state, arguments, tasks)
    return app


def set_served_names(app: FastAPI, model_path: str, names: list[str]) -> None:
    """Accept these names; answers name the first as their `model`. Running requests keep the name they began with."""
    from vllm.entrypoints.openai.models.protocol import BaseModelPath

    # In place: the registry of models shares the list.
    app.state.openai_serving_models.base_model_paths[:] = [
        BaseModelPath(name=name, model_path=model_path) for name in names
    ]


def rename_mapper(model: Any) -> Any:
    """Mapper from checkpoint names to the model's, without those that only fuse modules into one layer; or None."""
    mapper = getattr(model, "hf_to_vllm_mapper", None)
    if mapper is None:
        return None
    return mapper.get_rename_mapper() if hasattr(mapper, "get_rename_mapper") else mapper.get_unstacked_mapper()
