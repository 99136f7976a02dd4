"""Linear layers of the local experts: one grouped matrix product for all of them if torch supports it.

The weights are separate parameters, under Transformer Engine's names, but adjacent in memory: from their construction,
and again in the flat buffers that Megatron's data-parallel wrapper moves them (and their float32 gradients) to, which
it fills from the last registered parameter to the first. So all of them are one strided view [experts, out, in], and
nothing is copied. Every product checks their addresses.

The grouped product gives gradients of the weights in bfloat16, which are then added to the float32 buffer; a product
per expert adds in float32 (`WeightGradient`).
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import divide
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_train import kernels
from skyrl_train.megatron.layers.expert_rows import ExpertRows
from skyrl_train.megatron.layers.recompute import EXPERT_SWIGLU, recomputes, unsaved_activation
from skyrl_train.megatron.layers.weight_gradient import WeightGradient

ALIGNMENT = 16
"""Bytes; rows and matrices of a grouped product start at multiples of it. Numbers of tokens are not restricted."""
MAX_GROUPS = 1023
"""Groups of one grouped product on a GPU, at most."""


Weights = Sequence[Tensor] | Tensor
"""[out, in] of each expert, or one tensor [experts, out, in]."""


def grouped_linear(x: Tensor, weights: Weights, rows: ExpertRows | Sequence[int]) -> Tensor:
    """Multiply x [T, in], ordered by expert, by the weights of the experts -> [T, out]. Gradients of weights with a
    `main_grad` of Megatron's data-parallel wrapper are added to it, as in Megatron's own linear layers; then only the
    first weight gets a stand-in for its gradient (`reduce_together`). Args: rows: of each expert.
    """
    rows = rows if isinstance(rows, ExpertRows) else ExpertRows(rows)
    rows.check(x)
    if isinstance(weights, Tensor):
        return _GroupedLinear.apply(x, rows, None, weights)
    # Each tensor that autograd records costs microseconds of host time, for which the GPU waits.
    has_one_gradient = hasattr(weights[0], "main_grad") or not weights[0].requires_grad
    return _GroupedLinear.apply(x, rows, weights, *weights[: 1 if has_one_gradient else len(weights)])


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: ExpertRows, separate: Sequence[Tensor] | None, *connected: Tensor) -> Tensor:
        """Args: separate: the weights, of which some are connected; None if they are the one connected tensor."""
        weights = connected[0] if separate is None else separate
        ctx.save_for_backward(x)
        # Not with save_for_backward, which would check the version of each weight.
        ctx.rows, ctx.weights = rows, weights
        return _by_run(_row_major(x), rows, weights, lambda block: block.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        rows, weights = ctx.rows, ctx.weights
        grad = _row_major(grad)
        grad_x = _by_run(grad, rows, weights, lambda block: block) if ctx.needs_input_grad[0] else None
        trained = ctx.needs_input_grad[3:]
        if not any(trained):
            return grad_x, None, None, *[None] * len(trained)
        assert all(trained), "experts of a layer are trained together or not at all"
        return grad_x, None, None, *_weight_gradients(grad, _row_major(x), rows, weights)


def _row_major(x: Tensor) -> Tensor:
    """Contiguous with regular strides: a single row may have any, and torch checks them."""
    return x.contiguous().flatten().view(x.shape)


def _by_run(x: Tensor, rows: ExpertRows, weights: Weights, oriented: Callable[[Tensor], Tensor]) -> Tensor:
    """Multiply each expert's rows by its weight, one grouped product per run of adjacent weights -> [T, columns].
    Args: oriented: transposes or keeps [n, out, in].
    """
    parts = []
    for first, block in _runs(weights, joined=_is_supported(x, weights)):
        ours, matrices = rows.of(x, first, len(block)), oriented(block)
        if len(block) == 1 or len(ours) == 0:
            parts.append(ours @ matrices[0])
        else:
            parts.append(F.grouped_mm(ours, matrices, offs=rows.ends(x.device, first, len(block))))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _weight_gradients(grad: Tensor, x: Tensor, rows: ExpertRows, weights: Weights) -> Sequence[Tensor]:
    """Gradients from contiguous grad [T, out] and x [T, in]; one stand-in if they were added to their `main_grad`."""
    joined = _is_supported(x, weights)
    if hasattr(weights[0], "grad_added_to_main_grad"):
        for first, block in _runs([weight.main_grad for weight in weights], joined=joined):  # type: ignore[union-attr]
            ours = rows.of(grad, first, len(block)), rows.of(x, first, len(block))
            if len(ours[0]) == 0:
                continue
            if len(block) == 1:
                WeightGradient.wgrad_gemm_accum_fp32(ours[1], ours[0], block[0])
            else:
                _add(block, _products(*ours, rows, first, len(block)))
        # The wrapper's hook runs for a parameter that gets a gradient, and drops it unread.
        weights[0].grad_added_to_main_grad = True  # type: ignore[attr-defined]
        return [weights[0].new_empty(weights[0].shape)]
    if len(x) == 0:
        products = grad.new_zeros(len(weights), *weights[0].shape)
    elif joined:
        products = _products(grad, x, rows, 0, len(weights))
    else:
        separate = (rows.of(grad, expert, 1).t() @ rows.of(x, expert, 1) for expert in range(len(weights)))
        products = torch.stack(list(separate))
    return [products] if isinstance(weights, Tensor) else products.unbind(0)


def _products(grad: Tensor, x: Tensor, rows: ExpertRows, first: int, num: int) -> Tensor:
    """[num, out, in]: grad^T x over the rows of each expert."""
    # The only one of the four layouts that does not restrict numbers of tokens.
    products = F.grouped_mm(grad.t(), x, offs=rows.ends(x.device, first, num))
    if x.is_cuda and not _writes_zeros(x.device):
        rows.clear_without_rows(products, first)
    return products


def _add(total: Tensor, products: Tensor) -> None:
    """total [n, out, in] += products, of another dtype."""
    if kernels.serve(total):
        from skyrl_train.kernels import additions

        additions.add(total, products)
    else:
        total.add_(products)


def _is_supported(x: Tensor, weights: Weights) -> bool:
    """Whether torch has a grouped kernel. On other GPUs, and for float32, it would loop and wait for the device."""
    is_aligned = all(size * x.element_size() % ALIGNMENT == 0 for size in weights[0].shape)
    if not is_aligned or len(weights) > MAX_GROUPS:
        return False
    if x.is_cuda:
        return x.dtype == torch.bfloat16 and _has_grouped_kernel(x.device)
    return x.dtype in (torch.bfloat16, torch.float32)


@functools.cache
def _has_grouped_kernel(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


@functools.cache
def _writes_zeros(device: torch.device) -> bool:
    """Whether the kernel writes the product of an expert without rows; on Blackwell it does not
    (https://github.com/pytorch/pytorch/issues/172439)."""
    return torch.cuda.get_device_capability(device)[0] == 9


def _runs(tensors: Weights, *, joined: bool) -> Iterator[tuple[int, Tensor]]:
    """Yield (index of the first, view [n, *shape]) of tensors of one shape at equal distances in one storage.

    Usually one run of all of them; two if a bucket of the data-parallel wrapper ends between them and is padded; one
    run per tensor if they were allocated separately, or unless `joined`.
    """
    if isinstance(tensors, Tensor) and joined:
        yield 0, tensors.detach()
        return
    addresses = [tensor.data_ptr() for tensor in tensors]
    first = 0
    while first < len(tensors):
        num = _num_joined(tensors[first], addresses[first:]) if joined else 1
        if num == 1:
            yield first, tensors[first].detach()[None]
        else:
            distance = (addresses[first + 1] - addresses[first]) // tensors[first].element_size()
            tensor = tensors[first].detach()
            yield first, tensor.as_strided((num, *tensor.shape), (distance, *tensor.stride()))
        first += num


def _num_joined(tensor: Tensor, addresses: Sequence[int]) -> int:
    """Number of tensors at `addresses`, of which `tensor` is the first, that are one view of its storage."""
    storage = tensor.untyped_storage()
    end = storage.data_ptr() + storage.nbytes()
    size = tensor.numel() * tensor.element_size()
    if len(addresses) == 1 or not tensor.is_contiguous():
        return 1
    distance = addresses[1] - addresses[0]
    if distance < size or distance % ALIGNMENT:
        return 1
    num = 1
    while num < len(addresses) and addresses[num] - addresses[num - 1] == distance and addresses[num] + size <= end:
        num += 1
    return num


class GroupedLinear(torch.nn.Module):
    """Linear layers of the local experts, `weight0 ... weightN-1`, each applied to its own tokens."""

    shard_axis: int
    """Axis of a weight [out, in] that expert-tensor parallelism shards: 0 for column, 1 for row parallel."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: TransformerConfig,
        init_method: Callable[[Tensor], Any],
        bias: bool,
        pg_collection: Any,
        **_: Any,
    ) -> None:
        super().__init__()
        assert not bias, "the bridges build experts without bias"
        self.num_gemms = num_gemms
        self._names = [f"weight{index}" for index in range(num_gemms)]
        shape = [output_size, input_size]
        shape[self.shard_axis] = divide(shape[self.shard_axis], pg_collection.expt_tp.size())
        # Megatron-core 0.16 reduces expert gradients over the dense data-parallel group when ETP = 1 < TP, which loses
        # some of them.
        own_group = config.expert_model_parallel_size > 1 or pg_collection.expt_tp.size() != pg_collection.tp.size()
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        block = torch.empty([num_gemms, *shape], dtype=config.params_dtype, device=device)
        weights = [torch.nn.Parameter(weight) for weight in block.unbind(0)]
        for weight in weights:
            if config.perform_initialization:
                init_method(weight)
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=self.shard_axis, stride=1)
            weight.allreduce = not own_group  # type: ignore[attr-defined]
        # In reverse: Megatron's buffers hold parameters in the opposite order of their registration.
        for name, weight in zip(reversed(self._names), reversed(weights), strict=True):
            self.register_parameter(name, weight)

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """Weights in the order of the experts."""
        return [self._parameters[name] for name in self._names]  # type: ignore[misc]

    def forward(self, x: Tensor, rows: ExpertRows | Sequence[int]) -> tuple[Tensor, None]:
        return grouped_linear(x, self.weights, rows), None


def reduce_together(wrapper: Any, layer: GroupedLinear) -> None:
    """Mark the gradients of all weights ready when the first weight's is, for a data-parallel wrapper that overlaps
    reduction with the backward pass. One hook per weight took milliseconds per layer with 128 experts.
    """
    first, *others = layer.weights
    if not first.requires_grad:
        return

    def ready(*_: Any) -> None:
        for weight in others:
            wrapper.param_to_bucket_group[weight].register_grad_ready(weight, wrapper.force_all_reduce)

    node: Any = first.expand_as(first).grad_fn.next_functions[0][0]  # type: ignore[union-attr]
    node.register_hook(ready)
    wrapper.grad_accs.append(node)  # keeps the node alive


class GroupedColumnLinear(GroupedLinear):
    shard_axis = 0


class GroupedRowLinear(GroupedLinear):
    shard_axis = 1

    def __init__(self, *args: Any, config: TransformerConfig, **kwargs: Any) -> None:
        super().__init__(*args, config=config, **kwargs)
        self._recomputes = recomputes(config, EXPERT_SWIGLU)

    def forward(self, x: Tensor, rows: ExpertRows | Sequence[int]) -> tuple[Tensor, None]:
        with unsaved_activation(x) if self._recomputes else contextlib.nullcontext():
            return super().forward(x, rows)
