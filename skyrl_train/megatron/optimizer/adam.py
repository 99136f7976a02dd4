"""AdamW in plain torch with the state layout of Apex's FusedAdam, which Megatron's distributed optimizer expects.

`exp_avg` and `exp_avg_sq` per parameter and one `step` per group, unlike torch's AdamW; updates use torch's
multi-tensor kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class FusedAdam(torch.optim.Optimizer):
    """AdamW (arXiv:1711.05101): decay is decoupled from the gradient."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        adam_w_mode: bool = True,
        weight_decay: float = 0.0,
        **_: Any,
    ) -> None:
        assert bias_correction and adam_w_mode, "only AdamW with bias correction is supported"
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "bias_correction": True}
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                self._update(group, params)

    def _update(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for p in params:
            if not self.state[p]:
                self.state[p] = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
        # Fused kernels read the step on the device, where this one is created without a copy.
        step = torch.full((), float(group["step"]), device=params[0].device)
        gradients: list[Any] = [p.grad for p in params]
        averages, squares = ([self.state[p][name] for p in params] for name in ("exp_avg", "exp_avg_sq"))
        self._apply(group, params, gradients, averages, squares, step)

    def _apply(
        self,
        group: dict[str, Any],
        params: list[Tensor],
        gradients: list[Tensor],
        averages: list[Tensor],
        squares: list[Tensor],
        step: Tensor,
    ) -> None:
        torch._fused_adamw_(
            params,
            gradients,
            averages,
            squares,
            [],
            [step] * len(params),
            lr=group["lr"],
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            amsgrad=False,
            maximize=False,
            grad_scale=None,
            found_inf=None,
        )


def install(kind: type[FusedAdam]) -> None:
    """Make megatron-core of this process build this Adam from now on, on its path for Apex's."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    optimizer.Adam = distrib_optimizer.Adam = kind
    optimizer.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True
    distrib_optimizer.USING_TE_OPTIMIZER = False
