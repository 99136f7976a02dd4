"""Linear layers of the local experts: one matrix product for all of them where torch has it.

The weights stay parameters of their own, under Transformer Engine's names. But they lie in memory one after another:
from their construction, and again in the flat buffers that Megatron's data-parallel wrapper moves them (and their
float32 gradients) to, which it fills from the last registered parameter to the first. So all of them are one strided
view [experts, out, in], and nothing is copied. Whether they still lie so is asked at every product, of their addresses.

The one product gives gradients of the weights in bfloat16, which are then added to the float32 buffer; a product per
expert adds in float32 (gradients.py).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, pairwise
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.tensor_parallel.layers import set_tensor_model_parallel_attributes
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.utils import make_sharded_tensors_for_checkpoint
from megatron.core.utils import divide
from torch import Tensor
from torch.autograd.function import once_differentiable

from skyrl_train.megatron.layers.gradients import WeightGradient

ALIGNMENT = 16
"""Bytes: rows and matrices of a grouped product start at a multiple of it. Numbers of tokens are free."""
MOST_GROUPS = 1023
"""Of one grouped product on a GPU."""


def grouped_linear(x: Tensor, weights: Sequence[Tensor], tokens_per_expert: Sequence[int]) -> Tensor:
    """x [T, in] = the tokens of each expert one after another, weights [out, in] each -> [T, out].

    Gradients of weights that have a `main_grad` of Megatron's data-parallel wrapper are added to it here, as its own
    linear layers do.
    """
    return _GroupedLinear.apply(x, _Tokens(tokens_per_expert, x.device), *weights)


class _Tokens:
    """Which rows are whose. The numbers are the host's, which has them from Megatron: nothing waits for a GPU."""

    def __init__(self, counts: Sequence[int], device: torch.device) -> None:
        self._starts, self._device = [0, *accumulate(counts)], device
        self._ends: dict[tuple[int, int], Tensor] = {}

    @property
    def total(self) -> int:
        return self._starts[-1]

    def rows(self, x: Tensor, first: int, num: int) -> Tensor:
        """Those of `num` experts from the one called `first`."""
        start, end = self._starts[first], self._starts[first + num]
        return x if end - start == len(x) else x[start:end]

    def ends(self, first: int, num: int) -> Tensor:
        """[num] int32 on the device: where each of these experts' rows end among theirs."""
        if (first, num) not in self._ends:
            origin = self._starts[first]
            values = [end - origin for end in self._starts[first + 1 : first + num + 1]]
            is_cuda = self._device.type == "cuda"
            host = torch.tensor(values, dtype=torch.int32, pin_memory=is_cuda)
            self._ends[first, num] = host.to(self._device, non_blocking=True)
        return self._ends[first, num]

    def without(self, first: int, num: int) -> list[int]:
        """Those of the experts, counted from `first`, that have no rows."""
        bounds = self._starts[first : first + num + 1]
        return [index for index, (start, end) in enumerate(pairwise(bounds)) if start == end]


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: _Tokens, *weights: Tensor) -> Tensor:
        assert tokens.total == len(x), f"{tokens.total} tokens of experts, {len(x)} rows"
        ctx.save_for_backward(x)
        # Not saved for backward: that would ask each of them for its version.
        ctx.tokens, ctx.weights = tokens, weights
        return _by_stretch(_row_major(x), tokens, weights, lambda block: block.transpose(1, 2))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = ctx.saved_tensors
        tokens, weights = ctx.tokens, ctx.weights
        grad = _row_major(grad)
        grad_x = _by_stretch(grad, tokens, weights, lambda block: block) if ctx.needs_input_grad[0] else None
        trained = ctx.needs_input_grad[2:]
        if not any(trained):
            return grad_x, None, *[None] * len(weights)
        assert all(trained), "experts of a layer are trained together or not at all"
        return grad_x, None, *_weight_gradients(grad, _row_major(x), tokens, weights)


def _row_major(x: Tensor) -> Tensor:
    """Contiguous, also by its strides: those of a single row may be anything, and torch looks at them."""
    return x.contiguous().flatten().view(x.shape)


def _by_stretch(x: Tensor, tokens: _Tokens, weights: Sequence[Tensor], oriented: Callable[[Tensor], Tensor]) -> Tensor:
    """Rows times the matrices that `oriented` makes of the weights [n, out, in] -> [T, columns]."""
    parts = []
    for first, block in _stretches(weights, joined=_is_served(x, weights)):
        rows, matrices = tokens.rows(x, first, len(block)), oriented(block)
        if len(block) == 1 or len(rows) == 0:
            parts.append(rows @ matrices[0])
        else:
            parts.append(F.grouped_mm(rows, matrices, offs=tokens.ends(first, len(block))))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _weight_gradients(grad: Tensor, x: Tensor, tokens: _Tokens, weights: Sequence[Tensor]) -> Sequence[Tensor | None]:
    """Of grad [T, out] and x [T, in], both contiguous; stand-ins for them where they were added to a `main_grad`."""
    joined = _is_served(x, weights)
    if hasattr(weights[0], "grad_added_to_main_grad"):
        for first, block in _stretches([weight.main_grad for weight in weights], joined=joined):  # type: ignore[attr-defined]
            ours = tokens.rows(grad, first, len(block)), tokens.rows(x, first, len(block))
            if len(ours[0]) == 0:
                continue
            if len(block) == 1:
                WeightGradient.wgrad_gemm_accum_fp32(ours[1], ours[0], block[0])
            else:
                block.add_(_products(*ours, tokens, first, len(block)))
        for weight in weights:
            weight.grad_added_to_main_grad = True  # type: ignore[attr-defined]
        # The wrapper's hooks run for parameters that get a gradient, and drop it unread. Views of one tensor take no
        # memory and autograd keeps them as they are; the same tensor for all it would copy for each.
        return weights[0].new_empty(weights[0].shape).expand(len(weights), -1, -1).unbind(0)
    if joined and len(x):
        return _products(grad, x, tokens, 0, len(weights)).unbind(0)
    return [tokens.rows(grad, one, 1).t() @ tokens.rows(x, one, 1) for one in range(len(weights))]


def _products(grad: Tensor, x: Tensor, tokens: _Tokens, first: int, num: int) -> Tensor:
    """[num, out, in] = grad^T x over the rows of each of the experts."""
    # Of the four layouts this is the one without conditions on numbers of tokens: the tokens are nobody's rows.
    products = F.grouped_mm(grad.t(), x, offs=tokens.ends(first, num))
    if x.is_cuda and (none := tokens.without(first, num)):
        # https://github.com/pytorch/pytorch/issues/172439: on Blackwell what stands there is left as it is.
        torch._foreach_zero_([products[one] for one in none])
    return products


def _is_served(x: Tensor, weights: Sequence[Tensor]) -> bool:
    """Whether torch has one product for them. On other GPUs, and for float32, it would loop and wait for the device."""
    is_aligned = all(size * x.element_size() % ALIGNMENT == 0 for size in weights[0].shape)
    if not is_aligned or len(weights) > MOST_GROUPS:
        return False
    if x.is_cuda:
        return x.dtype == torch.bfloat16 and _has_grouped_kernel(x.device)
    return x.dtype in (torch.bfloat16, torch.float32)


@functools.cache
def _has_grouped_kernel(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] in (9, 10)


def _stretches(tensors: Sequence[Tensor], *, joined: bool) -> Iterator[tuple[int, Tensor]]:
    """(index of the first, view [n, *shape]) of tensors of one shape that lie at equal distances in one storage.

    Most often all of them. Where a bucket of the data-parallel wrapper ends between them and is padded, there are two;
    tensors that were allocated one by one come one by one, as do all of them unless `joined`.
    """
    addresses = [tensor.data_ptr() for tensor in tensors]
    first = 0
    while first < len(tensors):
        num = _num_joined(tensors[first], addresses[first:]) if joined else 1
        if num == 1:
            yield first, tensors[first].detach()[None]
        else:
            distance = (addresses[first + 1] - addresses[first]) // tensors[first].element_size()
            one = tensors[first].detach()
            yield first, one.as_strided((num, *one.shape), (distance, *one.stride()))
        first += num


def _num_joined(tensor: Tensor, addresses: Sequence[int]) -> int:
    """How many of the tensors at `addresses`, the first of which is `tensor`, are one view of its storage."""
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
    """Linear layers of the local experts, `weight0 ... weightN-1`, each applied to its own run of tokens.

    `shard_axis` is the axis of a weight [out, in] that expert-tensor parallelism cuts: 0 for column, 1 for row
    parallel.
    """

    shard_axis: int

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
        self.num_gemms, self.groups = num_gemms, pg_collection
        self._names = [f"weight{index}" for index in range(num_gemms)]
        shape = [output_size, input_size]
        shape[self.shard_axis] = divide(shape[self.shard_axis], pg_collection.expt_tp.size())
        # 0.16 leaves expert gradients in the dense data-parallel group when ETP = 1 < TP, which loses a part of them.
        own_group = config.expert_model_parallel_size > 1 or pg_collection.expt_tp.size() != pg_collection.tp.size()
        device = torch.device("cpu") if config.use_cpu_initialization else torch.cuda.current_device()
        block = torch.empty([num_gemms, *shape], dtype=config.params_dtype, device=device)
        weights = [torch.nn.Parameter(one) for one in block.unbind(0)]
        for weight in weights:
            if config.perform_initialization:
                init_method(weight)
            set_tensor_model_parallel_attributes(weight, is_parallel=True, dim=self.shard_axis, stride=1)
            weight.allreduce = not own_group  # type: ignore[attr-defined]
        # The last first: Megatron's buffers hold them in the opposite order of their registration.
        for name, weight in zip(reversed(self._names), reversed(weights), strict=True):
            self.register_parameter(name, weight)

    @property
    def weights(self) -> list[torch.nn.Parameter]:
        """By the experts' numbers."""
        return [self._parameters[name] for name in self._names]  # type: ignore[misc]

    def forward(self, x: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        return grouped_linear(x, self.weights, tokens_per_expert), None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """One tensor over all experts, cut along the expert axis (as Transformer Engine's grouped linear saves it)."""
        ep, dp_cp_group = self.groups.ep, (metadata or {})["dp_cp_group"]
        state: dict[str, Any] = {}
        for index, weight in enumerate(self.weights):
            expert = ep.rank() * self.num_gemms + index
            offsets = (*sharded_offsets, (len(sharded_offsets), expert, ep.size() * self.num_gemms))
            one = make_sharded_tensors_for_checkpoint(
                {"weight": weight},
                prefix,
                {"weight": self.shard_axis},
                offsets,
                tp_group=self.groups.expt_tp,
                dp_cp_group=dp_cp_group,
            )[f"{prefix}weight"]
            one.replica_id = (*one.replica_id[:2], self.groups.expt_dp.rank())
            state[f"{prefix}weight{index}"] = one
        return state


class GroupedColumnLinear(GroupedLinear):
    shard_axis = 0


class GroupedRowLinear(GroupedLinear):
    shard_axis = 1
