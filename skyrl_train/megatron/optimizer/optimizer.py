"""Megatron's distributed optimizer: how it is built, the learning rate, and a step that skips non-finite gradients."""

from __future__ import annotations

import math
from typing import Any

import torch
from megatron.core.distributed import finalize_model_grads
from megatron.core.optimizer import OptimizerConfig as MegatronOptimizerConfig
from megatron.core.optimizer import get_megatron_optimizer

from skyrl_train.config.policy import OptimizerConfig
from skyrl_train.megatron.lora.adapters import Lora
from skyrl_train.megatron.model.model import Model
from skyrl_train.megatron.optimizer import adam, many_tensors
from skyrl_train.megatron.optimizer.host_adam import HostAdam
from skyrl_train.megatron.residency.memory import torch_optimizers


def build_optimizer(model: Model, config: OptimizerConfig, *, on_host: bool = False) -> Any:
    """Megatron's distributed Adam over the chunks, wired into the model's configuration. Args: on_host: keep its
    moments in host memory. Raises: MemoryError if the host has too little for them.
    """
    if on_host:
        adam.install(HostAdam)
    elif model.torch_layers:
        adam.install(adam.FusedAdam)
    settings = MegatronOptimizerConfig(
        optimizer="adam",
        lr=config.lr,
        weight_decay=config.weight_decay,
        adam_beta1=config.adam_betas[0],
        adam_beta2=config.adam_betas[1],
        adam_eps=config.adam_eps,
        clip_grad=config.max_grad_norm,
        bf16=model.dtype == torch.bfloat16,
        params_dtype=model.dtype,
        use_distributed_optimizer=True,
    )
    optimizer = get_megatron_optimizer(settings, model.chunks, use_gloo_process_groups=False)
    for part in torch_optimizers(optimizer):
        if isinstance(part, HostAdam):
            part.place_moments()
    many_tensors.install(optimizer)
    mcore = model.bridge.config
    mcore.finalize_model_grads_func = _finalizer(model.lora)
    mcore.grad_scale_func = optimizer.scale_loss
    if model.chunks[0].ddp_config.overlap_grad_reduce:
        sync = [chunk.no_sync for chunk in model.chunks]
        start = [chunk.start_grad_sync for chunk in model.chunks]
        mcore.no_sync_func = sync if len(sync) > 1 else sync[0]
        mcore.grad_sync_func = start if len(start) > 1 else start[0]
    return optimizer


def _finalizer(lora: Lora | None) -> Any:
    def finalize(chunks: list[Any], num_tokens: object, **kwargs: Any) -> None:
        # Losses are sums. Given the number of tokens, which is 0, Megatron 0.16 would have the host wait for it, and
        # 0.19 would multiply all gradients by 1.
        finalize_model_grads(chunks, None, **kwargs)
        if lora is not None:
            lora.reduce_gradients()

    return finalize


def set_learning_rate(optimizer: Any, lr: float, weight_decay: float) -> None:
    """Set the values of Megatron's scheduler; without its wd_mult of 0, norms and biases would decay too."""
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_mult", 1.0)
        group["weight_decay"] = weight_decay * group.get("wd_mult", 1.0)


def learning_rate(step: int, num_steps: int, config: OptimizerConfig) -> float:
    """Learning rate of optimizer step `step` (the first is 0) of `num_steps`. Warm-up rises linearly to lr at its last
    step; linear and cosine then fall from lr and reach min_lr_ratio * lr after the last step, like those of
    transformers, so that the last step has an effect also with a ratio of 0.
    """
    if step < config.num_warmup_steps:
        return config.lr * (step + 1) / config.num_warmup_steps
    if config.scheduler == "constant_with_warmup":
        return config.lr
    decay_steps = max(1, num_steps - config.num_warmup_steps)
    progress = min(1.0, (step - config.num_warmup_steps) / decay_steps)
    fraction = 1 - progress if config.scheduler == "linear" else 0.5 * (1 + math.cos(math.pi * progress))
    return config.lr * (config.min_lr_ratio + (1 - config.min_lr_ratio) * fraction)


@torch.no_grad()
def step_if_finite(optimizer: Any) -> float:
    """Step Megatron's optimizer, unless the gradient is not finite. Returns: the gradient's norm before clipping.

    Megatron (0.16 and 0.19) checks for infinities only with float16's loss scaling; in bfloat16 and float32 one NaN
    would spread to every weight. All ranks have the same norm, so all of them step or none.
    """
    optimizer.prepare_grads()
    norm = float(optimizer.get_grad_norm())
    if math.isfinite(norm):
        many_tensors.clip(optimizer, norm)
        optimizer.step_with_ready_grads()
    return norm
