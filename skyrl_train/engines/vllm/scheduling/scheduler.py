"""The logprobs of a request travel once, when it ends.

vLLM (0.26 to 0.33) sends the logprob of every token from its core to its front end as three arrays of one number. 512
requests of a model of 0.6 billion then keep the front end busy all the time, and generation takes 12 to 40 % longer on
an H200 (benchmarks/studies/logprob_traffic.py). Here a scheduler keeps them until the request's last output.

Only for requests whose caller reads nothing before the end and whose end the core decides: those that are streamed, or
may end at a stop string, which the front end looks for, get theirs with each token.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc

from skyrl_train.engines.settings import OWN_KV_CACHE
from skyrl_train.engines.vllm.scheduling.kept_logprobs import KeptLogprobs, StepLogprobs
from skyrl_train.engines.vllm.scheduling.kv_blocks import (
    forget_prefixes,
    has_one_kind_of_block,
    skip_needless_allocations,
    skip_needless_resets,
)
from skyrl_train.engines.vllm.scheduling.plain_steps import PlainSteps, has_plain_steps

if TYPE_CHECKING:
    from vllm.v1.request import Request


class KeepsLogprobs(Scheduler):
    """A scheduler whose outputs carry no logprobs of requests that run, where nobody would read them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        skip_needless_allocations(self.kv_cache_manager)
        skip_needless_resets(self.kv_cache_manager.block_pool)
        self._kept = KeptLogprobs(lambda request_id: self._may_wait(request_id))
        self._plain = PlainSteps(self, self._kept) if has_plain_steps(self) else None
        self._keeps_blocks = bool(self.vllm_config.additional_config.get(OWN_KV_CACHE))
        if self._keeps_blocks and not has_one_kind_of_block(self.kv_cache_manager):
            raise ValueError(
                "generator.recompute_kv_cache is false, and the model has layers without full attention, whose KV "
                "cache cannot be kept at a weight sync. Set recompute_kv_cache=true"
            )

    def reset_prefix_cache(self, reset_running_requests: bool = False, reset_connector: bool = False) -> bool:
        """A pause resets the running requests too, whose KV cache vLLM then computes again."""
        if not self._keeps_blocks:
            return super().reset_prefix_cache(reset_running_requests, reset_connector)
        is_reset = forget_prefixes(self.kv_cache_manager)
        return is_reset and (not reset_connector or self.reset_connector_cache())

    def schedule(self, *args: Any, **kwargs: Any) -> Any:
        schedule = functools.partial(super().schedule, *args, **kwargs)
        return schedule() if self._plain is None else self._plain.schedule(schedule)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> dict[int, EngineCoreOutputs]:
        step: Any = model_runner_output.logprobs
        if step is not None:
            step = model_runner_output.logprobs = StepLogprobs(step)
        taken: dict[int, list[EngineCoreOutput]] = {}
        if self._plain is not None:
            scheduler_output, taken = self._plain.take(scheduler_output, model_runner_output)
        by_client = super().update_from_output(scheduler_output, model_runner_output)
        for outputs in by_client.values():
            for output in outputs.outputs:
                part: Any = output.new_logprobs
                if output.finish_reason is not None:
                    output.new_logprobs = self._kept.take(output.request_id, part)
                elif part is not None:
                    output.new_logprobs = self._kept.kept_or_joined(output.request_id, part)
        for client, plain in taken.items():
            by_client.setdefault(client, EngineCoreOutputs()).outputs += plain
        return by_client

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Request]:
        """None means that the core ends all of them; it reports them to the front end with `_send_abort_outputs`."""
        ended = super().finish_requests(request_ids, finished_status)
        if request_ids is not None:
            for request in ended:
                self._kept.drop(request.request_id)
        return ended

    def _may_wait(self, request_id: str) -> bool:
        params = self.requests[request_id].sampling_params
        return params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop


class KeepsLogprobsAsync(KeepsLogprobs, AsyncScheduler):
    """KeepsLogprobs for steps that are scheduled before the previous step's tokens are known."""


def scheduler(vllm_config: Any, **arguments: Any) -> KeepsLogprobs:
    """Built by vLLM's core in its process."""
    _send_before_aborts()
    kind = KeepsLogprobsAsync if vllm_config.scheduler_config.async_scheduling else KeepsLogprobs
    return kind(vllm_config=vllm_config, **arguments)


@functools.cache
def _send_before_aborts() -> None:
    """Requests that a pause aborts end with what they have: send what was kept of them first."""
    send_aborts = EngineCoreProc._send_abort_outputs

    def send(core: EngineCoreProc, aborted: list[Request]) -> None:
        scheduler: Any = core.scheduler
        for request in aborted:
            if (kept := scheduler._kept.take(request.request_id)) is not None:
                output = EngineCoreOutput(request_id=request.request_id, new_token_ids=[], new_logprobs=kept)
                core.output_queue.put_nowait((request.client_index, EngineCoreOutputs(outputs=[output])))
        send_aborts(core, aborted)

    EngineCoreProc._send_abort_outputs = send
