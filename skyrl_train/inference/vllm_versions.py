"""Everything of vLLM that is used and differs between 0.26 and 0.33, in one place."""

from __future__ import annotations

from typing import Any

from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.model_executor.model_loader.reload import meta as _reload_meta
from vllm.v1.engine.async_llm import AsyncLLM

# Tensors that no weight loader fills during a layerwise reload; the name is SKIP_TENSORS in 0.26.
NOT_RELOADED: frozenset[str] = frozenset(getattr(_reload_meta, "SKIP_LOAD_TENSORS", _reload_meta.SKIP_TENSORS))


def build_async_llm(arguments: dict[str, Any]) -> AsyncLLM:
    """Raises: ValueError for an argument that this version of vLLM does not have."""
    try:
        engine_args = AsyncEngineArgs(**arguments)
    except TypeError as error:
        raise ValueError(f"vLLM refuses generator.engine_init_kwargs: {error}") from error
    return AsyncLLM.from_engine_args(engine_args)


async def init_weight_transfer(llm: AsyncLLM, init_info: dict[str, Any]) -> None:
    await llm.init_weight_transfer_engine(WeightTransferInitRequest(init_info=init_info))


async def update_weights(llm: AsyncLLM, update_info: dict[str, Any]) -> None:
    await llm.update_weights(WeightTransferUpdateRequest(update_info=update_info))


async def set_weight_version(llm: AsyncLLM, version: int) -> None:
    """Outputs and the HTTP API name this version; 0.26 has no such label."""
    if hasattr(llm, "update_weight_version"):
        await llm.update_weight_version(str(version))
