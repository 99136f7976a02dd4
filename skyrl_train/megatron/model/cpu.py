"""Runs Megatron-core on gloo without a GPU.

Megatron-core uses CUDA by name in a few places of a training step: the current device, streams, random states and
`Tensor.type()` strings. `enable()` patches the functions that a step reaches (megatron-core 0.16.1 and 0.19.2); a
TorchFunctionMode is slower and is not active inside autograd functions or other threads. `torch.cuda.is_available()`
stays False.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import torch

# Factories that megatron-core calls with device="cuda" or pin_memory=True.
FACTORIES = (
    "tensor",
    "zeros",
    "empty",
    "ones",
    "full",
    "arange",
    "rand",
    "randn",
    "zeros_like",
    "empty_like",
    "ones_like",
)


def _on_cpu(factory: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(factory)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        named = kwargs.get("device")
        if named is not None and str(named).startswith("cuda"):
            kwargs["device"] = "cpu"
        return factory(*args, **kwargs)

    return wrapped


class _Stream:
    """Replaces a CUDA stream or event: all work is already done."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Callable[..., _Stream]:
        if name.startswith("__"):
            raise AttributeError(name)
        # record_event returns an event, on which others wait.
        return lambda *args, **kwargs: self

    def __enter__(self) -> _Stream:
        return self

    def __exit__(self, *error: object) -> None:
        pass


def _patch_torch() -> None:
    from torch.utils._device import _device_constructors

    # `with torch.device("meta")` has a cached set of the factories; filled after the patch it would not contain them,
    # and transformers would load models with uninitialised buffers.
    _device_constructors()
    for name in FACTORIES:
        setattr(torch, name, _on_cpu(getattr(torch, name)))

    cuda = torch.cuda
    cuda.current_device = lambda: torch.device("cpu")  # type: ignore[assignment,return-value]
    cuda.set_device = lambda device: None  # type: ignore[assignment]
    cuda.synchronize = lambda device=None: None  # type: ignore[assignment]
    cuda.empty_cache = lambda: None  # type: ignore[assignment]
    # Not torch.manual_seed, which calls cuda.manual_seed_all.
    cuda.manual_seed = lambda seed: torch.default_generator.manual_seed(seed) and None  # type: ignore[assignment,func-returns-value]
    cuda.get_rng_state = lambda device="cuda": torch.get_rng_state()  # type: ignore[assignment,misc]
    cuda.set_rng_state = lambda state, device="cuda": torch.set_rng_state(state)  # type: ignore[assignment,misc]
    cuda.Stream = cuda.Event = _Stream  # type: ignore[assignment,misc]
    cuda.current_stream = lambda device=None: _Stream()  # type: ignore[assignment,return-value]
    cuda.default_stream = lambda device=None: _Stream()  # type: ignore[assignment,return-value]
    cuda.stream = lambda stream: contextlib.nullcontext()  # type: ignore[assignment,return-value]
    cuda.is_current_stream_capturing = lambda: False  # type: ignore[assignment]

    plain_type = torch.Tensor.type

    def type_as_on_cuda(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        result = plain_type(self, *args, **kwargs)
        return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result

    # The distributed optimizer, Float16 optimizer and gradient clipping branch on this string.
    torch.Tensor.type = type_as_on_cuda  # type: ignore[method-assign,assignment]
    torch.Tensor.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *args, **kwargs: self  # type: ignore[method-assign]
    torch.nn.Module.cuda = lambda self, *args, **kwargs: self  # type: ignore[method-assign]


def _patch_megatron() -> None:
    from megatron.core.tensor_parallel import random
    from megatron.core.transformer.moe import moe_utils, token_dispatcher

    random._set_cuda_rng_state = lambda state, device=-1, graph_safe=False: torch.set_rng_state(state)
    random._get_cuda_rng_state = lambda device="cuda", clone=False, graph_safe=False: torch.get_rng_state()

    def to_host(tensor: torch.Tensor | None, as_numpy: bool = False, record_stream: bool = False) -> Any:
        return tensor.numpy() if as_numpy and tensor is not None else tensor

    # Upstream skips tensors that are on the CPU already; all_to_all would get tensors instead of numbers.
    token_dispatcher.maybe_move_tensor_to_cpu = to_host
    moe_utils.te_general_gemm = None


def _patch_collectives() -> None:
    """Support lists of unequal tensors, which gloo rejects in all_gather and reduce_scatter (expert dispatcher)."""
    import torch.distributed as dist

    gather, scatter = dist.all_gather, dist.reduce_scatter

    def all_gather(
        tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
    ) -> Any:
        if len({t.shape for t in tensor_list}) == 1:
            return gather(tensor_list, tensor, group=group, async_op=async_op)
        for rank, out in enumerate(tensor_list):
            if rank == dist.get_rank(group):
                out.copy_(tensor)
            dist.broadcast(out, group_src=rank, group=group)
        return None

    def reduce_scatter(
        output: torch.Tensor,
        input_list: list[torch.Tensor],
        op: Any = dist.ReduceOp.SUM,
        group: Any = None,
        async_op: bool = False,
    ) -> Any:
        if len({t.shape for t in input_list}) == 1:
            return scatter(output, input_list, op=op, group=group, async_op=async_op)
        whole = torch.cat([t.reshape(-1) for t in input_list])
        dist.all_reduce(whole, op=op, group=group)
        parts = whole.split([t.numel() for t in input_list])
        output.copy_(parts[dist.get_rank(group)].view_as(output))
        return None

    dist.all_gather, dist.reduce_scatter = all_gather, reduce_scatter


@functools.cache
def enable() -> None:
    """Patch torch and megatron-core of this process for the CPU, once, before a model is built."""
    _patch_torch()
    _patch_megatron()
    _patch_collectives()
