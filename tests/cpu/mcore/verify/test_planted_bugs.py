"""Each known way to get the gradient of a split mini-batch wrong makes an exactness check fail.

The bugs are planted in this process; the workers are forked from it. The unpatched case of each passes in
test_exactness.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from skyrl_train.batching import split as splitting
from skyrl_train.megatron.layers import attention, experts, layers
from skyrl_train.megatron.optimizer import optimizer as optimizers
from skyrl_train.megatron.passes import head, metrics, packing, step
from skyrl_train.megatron.verify import layout_check
from skyrl_train.megatron.verify.layout_check import Layout
from tests.support.layouts import check, layout, reference

Patch = pytest.MonkeyPatch


@dataclass(frozen=True)
class Planted:
    """A bug and where it shows."""

    plant: Callable[[Patch], None]
    family: str
    layout: Layout
    says: str
    """What the failing check says."""


def forget_finalize(patch: Patch) -> None:
    patch.setattr(optimizers, "finalize_model_grads", lambda *args, **kwargs: None)


def finalize_twice(patch: Patch) -> None:
    finalize = optimizers.finalize_model_grads

    def twice(*args: Any, **kwargs: Any) -> None:
        finalize(*args, **kwargs)
        finalize(*args, **kwargs)

    patch.setattr(optimizers, "finalize_model_grads", twice)


def _scale_loss(patch: Patch, factor: Callable[[int], float]) -> None:
    run = step._run

    def scaled(model: Any, micro_batches: Any, on_logits: Any, **kwargs: Any) -> Any:
        def wrong(logits: Any, micro_batch: Any) -> Any:
            value, result = on_logits(logits, micro_batch)
            return value * factor(len(micro_batches)), result

        return run(model, micro_batches, wrong, **kwargs)

    patch.setattr(step, "_run", scaled)


def divide_by_micro_batches_twice(patch: Patch) -> None:
    _scale_loss(patch, lambda num_micro_batches: 1 / num_micro_batches)


def drop_the_context_parallel_factor(patch: Patch) -> None:
    _scale_loss(patch, lambda _: 1 / 2)


def return_two_values_from_the_loss(patch: Patch) -> None:
    """Megatron's convention of (loss, log), whose scale depends on the number of micro-batches."""
    schedule = step.get_forward_backward_func

    def with_two(**kwargs: Any) -> Any:
        forward_step = kwargs.pop("forward_step_func")

        def two_values(batches: Any, chunk: Any) -> Any:
            output, finish = forward_step(batches, chunk)

            def finish_with_two(logits: Any) -> Any:
                value, _, result = finish(logits)
                return value, result

            return output, finish_with_two

        return schedule()(forward_step_func=two_values, **kwargs)

    patch.setattr(step, "get_forward_backward_func", lambda: with_two)


def _replace_weights(patch: Patch, weights_of: Callable[[Any, int], torch.Tensor]) -> None:
    split = layout_check.split

    def wrong(*args: Any, **kwargs: Any) -> Any:
        batches = split(*args, **kwargs)
        return [
            replace(batch, loss_weights=dict.fromkeys(batch.loss_weights, weights_of(batch, len(batches))))
            for batch in batches
        ]

    patch.setattr(layout_check, "split", wrong)


def local_token_mean(patch: Patch) -> None:
    """The mean of the ranks' means: tokens of a rank with few weigh more."""
    _replace_weights(patch, lambda batch, ranks: batch.loss_mask / batch.loss_mask.sum() / ranks)


def count_tool_tokens(patch: Patch) -> None:
    """The divisor counts what the environment wrote."""
    loss_weights = splitting.loss_weights

    def wrong(reduction: str, mask: torch.Tensor, *rest: Any) -> torch.Tensor:
        return loss_weights(reduction, torch.ones_like(mask), *rest) * mask

    patch.setattr(splitting, "loss_weights", wrong)


def train_tool_tokens(patch: Patch) -> None:
    """Tokens of the environment are trained on."""
    loss_weights = splitting.loss_weights
    patch.setattr(splitting, "loss_weights", lambda name, mask, *rest: loss_weights(name, torch.ones_like(mask), *rest))


def modify_a_saved_tensor_in_place(patch: Patch) -> None:
    """Hidden states divided by the temperature in place, after they were saved for backward."""
    honest = head.Head.logprobs

    def wrong(self: head.Head, hidden: torch.Tensor, ids: torch.Tensor, **kwargs: Any) -> Any:
        result = honest(self, hidden, ids, **kwargs)
        hidden.data.div_(self.softmax.temperature)
        return result

    patch.setattr(head.Head, "logprobs", wrong)


def keep_the_weight_gradient_of_the_last_piece_only(patch: Patch) -> None:
    """The gradient of each piece of positions overwrites that of the piece before it."""

    def wrong(x: torch.Tensor, grad: torch.Tensor, main_grad: torch.Tensor) -> None:
        torch.mm(grad.t(), x, out=main_grad)

    patch.setattr(head.WeightGradient, "wgrad_gemm_accum_fp32", staticmethod(wrong))


def _change_softmax(patch: Patch, **changes: Any) -> None:
    build = step.head_of

    def wrong(*args: Any) -> head.Head:
        honest = build(*args)
        return replace(honest, softmax=replace(honest.softmax, **changes))

    patch.setattr(step, "head_of", wrong)


def leave_temperature_out(patch: Patch) -> None:
    _change_softmax(patch, temperature=1.0)


def let_padding_of_the_vocabulary_in(patch: Patch) -> None:
    _change_softmax(patch, vocab_size=132)


def keep_key_gradients_at_home(patch: Patch) -> None:
    """Context parallelism: each rank keeps the gradient of its own keys from its own queries only."""

    def wrong(ctx: Any, *grads: torch.Tensor) -> Any:
        return grads[0].chunk(ctx.group.size())[ctx.group.rank()].contiguous(), None

    patch.setattr(attention._GatherContext, "backward", staticmethod(wrong))


def forget_gradients_of_norms_under_sequence_parallelism(patch: Patch) -> None:
    init = layers.NormColumnLinear.__init__

    def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.layer_norm_weight.sequence_parallel = False

    patch.setattr(layers.NormColumnLinear, "__init__", wrong)


def reduce_experts_with_the_dense_group(patch: Patch) -> None:
    """What megatron-core 0.16 does to experts that expert-tensor parallelism does not cut."""
    init = experts.GroupedLinear.__init__

    def wrong(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        for parameter in self.parameters():
            parameter.allreduce = True

    patch.setattr(experts.GroupedLinear, "__init__", wrong)


def predict_the_token_itself(patch: Patch) -> None:
    """Labels not shifted: the value of a token is taken where the token is, not where it is predicted."""
    unpack = packing.unpack

    def wrong(values: torch.Tensor, micro_batch: Any) -> torch.Tensor:
        return unpack(values, replace(micro_batch, source=(micro_batch.source + 1).clamp(max=len(values))))

    patch.setattr(step, "unpack", wrong)


def sum_metrics_over_data_parallel_ranks_only(patch: Patch) -> None:
    groups = metrics.parallel_state

    class WithoutContext:
        def __getattr__(self, name: str) -> Any:
            return getattr(groups, name)

        def get_data_parallel_group(self, with_context_parallel: bool) -> Any:
            return groups.get_data_parallel_group()

    patch.setattr(metrics, "parallel_state", WithoutContext())


def skip_the_entropy_gradient(patch: Patch) -> None:
    backward = head._HeadLogprobs.backward
    patch.setattr(
        head._HeadLogprobs,
        "backward",
        staticmethod(lambda ctx, *grads: backward(ctx, grads[0], torch.zeros_like(grads[1]))),
    )


DP2, CP2, TP2, PP2 = layout(2, {}), layout(2, {"cp": 2}), layout(2, {"tp": 2}), layout(2, {"pp": 2})
GRADIENT, METRIC, LOGPROBS = "gradient is off", "metric .* is off", "is off"
BUGS = [
    Planted(forget_finalize, "qwen3_tied", DP2, GRADIENT),
    Planted(forget_finalize, "qwen3_tied", PP2, GRADIENT),
    Planted(finalize_twice, "qwen3_tied", PP2, GRADIENT),
    Planted(divide_by_micro_batches_twice, "qwen3_tied", DP2, GRADIENT),
    Planted(drop_the_context_parallel_factor, "qwen3_tied", CP2, GRADIENT),
    Planted(return_two_values_from_the_loss, "qwen3_tied", CP2, GRADIENT),
    Planted(local_token_mean, "qwen3_tied", DP2, GRADIENT),
    Planted(count_tool_tokens, "qwen3_tied", DP2, GRADIENT),
    Planted(train_tool_tokens, "qwen3_tied", DP2, GRADIENT),
    Planted(modify_a_saved_tensor_in_place, "qwen3_tied", DP2, GRADIENT),
    Planted(keep_the_weight_gradient_of_the_last_piece_only, "qwen3", DP2, GRADIENT),
    Planted(leave_temperature_out, "qwen3_tied", DP2, GRADIENT),
    Planted(let_padding_of_the_vocabulary_in, "qwen3_tied", TP2, GRADIENT),
    Planted(keep_key_gradients_at_home, "qwen3_tied", CP2, GRADIENT),
    Planted(forget_gradients_of_norms_under_sequence_parallelism, "qwen3_tied", TP2, GRADIENT),
    Planted(reduce_experts_with_the_dense_group, "qwen3_moe", layout(2, {"tp": 2, "etp": 1}), GRADIENT),
    Planted(predict_the_token_itself, "qwen3_tied", CP2, LOGPROBS),
    Planted(sum_metrics_over_data_parallel_ranks_only, "qwen3_tied", CP2, METRIC),
    Planted(skip_the_entropy_gradient, "qwen3_tied", PP2, GRADIENT),
]


@pytest.mark.parametrize("bug", BUGS, ids=lambda bug: bug.plant.__name__)
def test_a_planted_bug_is_found(bug: Planted, monkeypatch: Patch):
    reference(bug.family)
    bug.plant(monkeypatch)
    with pytest.raises(AssertionError, match=bug.says):
        check(bug.family, bug.layout)
