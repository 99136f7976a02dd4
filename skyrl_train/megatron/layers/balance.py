"""The load-balancing loss of mixture-of-experts routers, of the whole mini-batch.

For one layer of E experts of which each token takes K (Switch Transformer, arXiv:2101.03961, equation 4, over the
global batch as in arXiv:2501.11873):

    L = coefficient * E * sum_e f_e * P_e
    f_e = fraction of the mini-batch's T * K choices that went to expert e, without gradient
    P_e = mean over the mini-batch's T tokens of the router's score of expert e

With f and P per micro-batch, as in Megatron-core, the loss depends on how the mini-batch is split. Here f is counted
over the mini-batch by a forward pass before the training pass (a third more compute, only if the loss is used); L is
then linear in the tokens, and its gradient the same for every split. Padding is not counted.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor

from skyrl_train.device import device


@dataclass
class _Layer:
    """State of one router."""

    router: TopKRouter
    counts: Tensor
    """[E] float32: choices of this rank's tokens, then coefficient * E * f / T of the mini-batch."""
    recomputed: deque[Tensor] = field(default_factory=deque)
    """Token masks of forward passes that will be recomputed, in the order of their micro-batches."""


class Balance:
    """The load-balancing loss of all routers of this rank. `begin_counting`, a forward pass, `begin_training`, the
    training pass, `finish`. Otherwise routers are unchanged.
    """

    def __init__(self, modules: list[Any], coefficient: float) -> None:
        self._coefficient = coefficient
        self._mode = "off"
        self._is_token: Tensor | None = None
        self._loss = torch.zeros((), device=device())
        self._layers = [_wrap(self, m) for module in modules for m in module.modules() if isinstance(m, TopKRouter)]

    def enter_micro_batch(self, is_token: Tensor) -> None:
        """Prepare for the next forward pass. Args: is_token [P / C] bool, False at padding."""
        self._is_token = is_token

    def begin_counting(self) -> None:
        self._mode = "count"
        for layer in self._layers:
            layer.counts.zero_()

    def begin_training(self) -> None:
        """Sum the counts of all ranks. A collective over the stage."""
        self._mode = "train"
        self._loss.zero_()
        for layer in self._layers:
            _sum_over_stage(layer.counts)
            choices = layer.counts.sum().clamp(min=1)
            layer.counts *= self._coefficient * len(layer.counts) * layer.router.topk / choices.square()

    def finish(self) -> float:
        """The loss of the mini-batch, all layers and ranks. A collective over all of them."""
        self._mode = "off"
        assert not any(layer.recomputed for layer in self._layers), "a forward pass was never recomputed"
        _sum_over_stage(self._loss)
        dist.all_reduce(self._loss, group=parallel_state.get_pipeline_model_parallel_group())
        return float(self._loss)

    def route(self, layer: _Layer, logits: Tensor, probs: Tensor, routing_map: Tensor) -> Tensor:
        """Count the choices or attach the loss; returns the routing weights [n, E]."""
        if self._mode == "off":
            return probs
        if self._mode == "train" and layer.recomputed and torch.is_grad_enabled():
            is_token = layer.recomputed.popleft()
        else:
            is_token = self._local_tokens(layer.router)
        if self._mode == "count":
            layer.counts += (routing_map & is_token[:, None]).sum(0)
            return probs
        if not torch.is_grad_enabled():
            layer.recomputed.append(is_token)
            return probs
        scores = _scores(logits.view(-1, len(layer.counts)), layer.router)
        loss = (scores * is_token[:, None] * layer.counts).sum()
        self._loss += loss.detach()
        return MoEAuxLossAutoScaler.apply(probs, loss)

    def _local_tokens(self, router: TopKRouter) -> Tensor:
        assert self._is_token is not None
        if not router.config.sequence_parallel:
            return self._is_token
        parts = self._is_token.chunk(parallel_state.get_tensor_model_parallel_world_size())
        return parts[parallel_state.get_tensor_model_parallel_rank()]


def _wrap(balance: Balance, router: TopKRouter) -> _Layer:
    layer = _Layer(router, torch.zeros(router.config.num_moe_experts, device=router.weight.device))
    routing = router.routing

    def balanced(logits: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        probs, routing_map = routing(logits, *args, **kwargs)
        return balance.route(layer, logits, probs, routing_map), routing_map

    router.routing = balanced
    return layer


def _scores(logits: Tensor, router: TopKRouter) -> Tensor:
    """[n, E] float32, summing to 1 for each token."""
    if router.score_function == "softmax":
        return torch.softmax(logits, dim=-1, dtype=torch.float32)
    sigmoid = torch.sigmoid(logits.float())
    return sigmoid / (sigmoid.sum(-1, keepdim=True) + 1e-20)


def _sum_over_stage(values: Tensor) -> None:
    """Sum over the ranks of the stage, each with its own tokens (tensor ranks too: sequence parallelism)."""
    dist.all_reduce(values, group=parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True))
