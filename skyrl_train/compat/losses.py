"""Policy losses with skyrl_train 0.4's signature as losses of this project.

Such a loss reduces its [b, R] terms over a micro-batch with `reduce_loss`. Here the reduction has weights of the whole
mini-batch, which the objective applies. So inside a loss `reduce_loss` keeps the terms and returns a placeholder; how
the result depends on the placeholders gives each term its factor. A sum of reductions is therefore exact. A loss that
reduces in another way gives one number, which becomes the term of every token: that counts micro-batches by their share
of the reduction's weights, which is exact for a mean over the tokens of unpadded responses.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from skyrl_train.algorithms.inputs import LossTerms, TokenInputs
from skyrl_train.algorithms.metrics import Metric, Reduce
from skyrl_train.compat.padding import Responses
from skyrl_train.config.algorithm import PLACES

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Reductions:
    """Calls of `reduce_loss` during one call of a loss."""

    configured: str
    terms: list[Tensor] = field(default_factory=list)
    placeholders: list[Tensor] = field(default_factory=list)


_CURRENT: ContextVar[_Reductions | None] = ContextVar("reductions", default=None)
_warned: set[str] = set()


def reduce_loss(loss: Tensor, loss_mask: Tensor | None, loss_reduction: str, max_seq_len: int | None = None) -> Tensor:
    """Reduce terms [b, R] to a scalar: the mean over tokens, over samples of means, or over samples of normed sums.

    Raises: ValueError in a loss whose reduction is not trainer.algorithm.loss_reduction, or for an unknown one.
    """
    value = _reduced(loss, loss_mask, loss_reduction, max_seq_len)
    current = _CURRENT.get()
    if current is None:
        return value
    if loss_reduction != current.configured:
        raise ValueError(
            f"trainer.algorithm.loss_reduction is {current.configured}: the policy loss reduces by {loss_reduction}. "
            f"Set loss_reduction={loss_reduction}"
        )
    current.terms.append(loss if loss_mask is None else loss * loss_mask)
    current.placeholders.append(value.detach().clone().requires_grad_())
    return current.placeholders[-1]


def _reduced(loss: Tensor, loss_mask: Tensor | None, loss_reduction: str, max_seq_len: int | None) -> Tensor:
    mask = torch.ones_like(loss) if loss_mask is None else loss_mask
    if loss_reduction == "token_mean":
        return (loss * mask).sum() / mask.sum().clamp(min=1)
    if loss_reduction == "sequence_mean":
        return ((loss * mask).sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    if loss_reduction == "seq_mean_token_sum_norm":
        return ((loss * mask).sum(-1) / (max_seq_len or 1)).mean()
    if _CURRENT.get() is not None:  # any other reduction of this project
        return (loss * mask).sum()
    raise ValueError(f"loss_reduction is {loss_reduction}: it must be a reduction of skyrl_train 0.4")


def masked_mean(tensor: Tensor, mask: Tensor | None, dim: int | None = None) -> Tensor:
    """Mean over the entries in the mask, of everything or along `dim`; 0 without any."""
    if mask is None:
        return tensor.mean(dim)
    return (tensor * mask).sum(dim) / mask.sum(dim).clamp(min=1)


class PolicyLoss:
    """A loss f(log_probs, old_log_probs, advantages, config, loss_mask, rollout_logprobs) -> (scalar, metrics)."""

    needs_whole_samples = True
    """Ranks of context parallelism would have parts of the responses."""
    reads_max_seq_len = True

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function
        self.__name__, self.__qualname__, self.__module__ = names(function)

    def __call__(self, tokens: TokenInputs, **values: Any) -> LossTerms:
        """Raises: ValueError for another result than a scalar with metrics, or for parts of samples."""
        per_sample, size = tokens.per_sample, len(tokens.logprobs)
        if per_sample.group is not None:
            raise ValueError(f"{self.__name__} needs complete responses: set context_parallel_size=1")
        responses = Responses.trained(per_sample.sample, tokens.loss_mask)
        is_empty = len(responses.tokens) == 0
        if is_empty:  # only for the names of its metrics, which all ranks report
            one = torch.arange(1, device=tokens.logprobs.device)
            responses = Responses(one, one, one)
        log_probs = responses.padded(tokens.logprobs.detach() * 0 if is_empty else tokens.logprobs)
        mask = torch.ones_like(log_probs) if is_empty else responses.padded(tokens.loss_mask.to(log_probs.dtype))
        with torch.enable_grad():
            log_probs = log_probs if log_probs.requires_grad else log_probs.requires_grad_()
            value, metrics, reductions = self._called(
                values["loss_reduction"],
                log_probs,
                *(responses.padded(each) for each in (tokens.old_logprobs, tokens.advantages)),
                algorithm_config(values),
                loss_mask=mask,
                rollout_logprobs=responses.padded(tokens.rollout_logprobs),
            )
            if is_empty:
                terms = tokens.logprobs * 0
            else:
                terms = self._terms(value, log_probs, reductions, responses, size)
        return LossTerms(terms, {name: _constant(number, tokens) for name, number in metrics.items()})

    def _called(self, reduction: str, *tensors: Any, **others: Tensor) -> tuple[Tensor, Mapping[str, Any], _Reductions]:
        reductions = _Reductions(reduction)
        token = _CURRENT.set(reductions)
        try:
            result = self.function(*tensors, **accepted(self.function, others))
        finally:
            _CURRENT.reset(token)
        value, metrics = result if isinstance(result, tuple) and len(result) == 2 else (result, {})
        if not isinstance(value, Tensor) or value.numel() != 1 or not isinstance(metrics, Mapping):
            raise ValueError(
                f"the policy loss {self.__name__} returned {result!r:.100}: it must return (loss, metrics)"
            )
        return value.reshape(()), metrics, reductions

    def _terms(
        self, value: Tensor, log_probs: Tensor, reductions: _Reductions, responses: Responses, size: int
    ) -> Tensor:
        """[P]"""
        placeholders = reductions.placeholders
        if not value.requires_grad:
            return value.expand(size)
        direct, *factors = torch.autograd.grad(value, [log_probs, *placeholders], allow_unused=True, retain_graph=True)
        terms = torch.zeros(size, dtype=log_probs.dtype, device=log_probs.device)
        for matrix, factor in zip(reductions.terms, factors, strict=True):
            if factor is not None:
                terms = terms + factor * responses.packed(matrix, size)
        if direct is None:
            return terms
        if self.__qualname__ not in _warned:
            _warned.add(self.__qualname__)
            log.warning(
                "the policy loss %s does not reduce with reduce_loss: its value is that of a micro-batch, and depends "
                "on trainer.max_tokens_per_microbatch. End it with reduce_loss(...)",
                self.__name__,
            )
        pairs = zip(factors, placeholders, strict=True)
        known = sum(factor * each.detach() for factor, each in pairs if factor is not None)
        return terms + (value - known)


def _constant(number: Any, tokens: TokenInputs) -> Metric:
    """A number of a micro-batch, which counts by the number of its trained tokens."""
    value = number.detach() if isinstance(number, Tensor) else float(number)
    return Metric(torch.zeros_like(tokens.logprobs.detach()) + value, Reduce.TOKEN_MEAN)


def accepted(function: Callable[..., Any], named: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments that a function takes: those of older signatures lack some."""
    parameters = inspect.signature(function).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {name: value for name, value in named.items() if takes_all or name in parameters}


def names(function: Callable[..., Any]) -> tuple[str, str, str]:
    """Name, qualified name and module, also of an object that is called."""
    if isinstance(function, partial):
        return names(function.func)
    name = getattr(function, "__name__", type(function).__name__)
    return name, getattr(function, "__qualname__", name), function.__module__


def algorithm_config(values: Mapping[str, Any]) -> DictConfig:
    """`trainer.algorithm` as functions of 0.4 read it, with the user's own parameters beside its keys.

    Args: values: those of AlgorithmConfig.
    """
    return OmegaConf.create(_plain({name: value for name, value in values.items() if "." not in PLACES.get(name, "")}))


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {name: _plain(item) for name, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list | tuple) else value
