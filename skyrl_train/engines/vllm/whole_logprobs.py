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

import numpy as np
from vllm.sampling_params import RequestOutputKind
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.engine.core import EngineCoreProc
from vllm.v1.outputs import LogprobsLists

if TYPE_CHECKING:
    from vllm.v1.request import Request


class KeepsLogprobs(Scheduler):
    """A scheduler whose outputs carry no logprobs of requests that run, where nobody would read them."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._kept: dict[str, list[LogprobsLists]] = {}
        """Request that runs -> logprobs of the tokens that it has."""

    def update_from_output(self, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        by_client = super().update_from_output(*args, **kwargs)
        for outputs in by_client.values():
            for output in outputs.outputs:
                if output.finish_reason is not None:
                    output.new_logprobs = self.take(output.request_id, output.new_logprobs)
                elif output.new_logprobs is not None and self._may_wait(output.request_id):
                    self._kept.setdefault(output.request_id, []).append(output.new_logprobs)
                    output.new_logprobs = None
        return by_client

    def finish_requests(self, request_ids: str | Iterable[str] | None, finished_status: Any) -> list[Request]:
        """None means that the core ends all of them; it reports them to the front end with `_send_abort_outputs`."""
        ended = super().finish_requests(request_ids, finished_status)
        if request_ids is not None:
            for request in ended:
                self._kept.pop(request.request_id, None)
        return ended

    def take(self, request_id: str, last: LogprobsLists | None = None) -> LogprobsLists | None:
        """Remove and return the logprobs kept of a request, with the last ones."""
        parts = self._kept.pop(request_id, []) + ([] if last is None else [last])
        return joined(parts) if parts else None

    def _may_wait(self, request_id: str) -> bool:
        params = self.requests[request_id].sampling_params
        return params is not None and params.output_kind == RequestOutputKind.FINAL_ONLY and not params.stop


class KeepsLogprobsAsync(KeepsLogprobs, AsyncScheduler):
    """KeepsLogprobs for steps that are scheduled before the previous step's tokens are known."""


def joined(parts: list[LogprobsLists]) -> LogprobsLists:
    token_ids, logprobs, ranks = (np.concatenate(arrays) for arrays in zip(*(part[:3] for part in parts), strict=True))
    return LogprobsLists(token_ids, logprobs, ranks)


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
            if (kept := scheduler.take(request.request_id)) is not None:
                output = EngineCoreOutput(request_id=request.request_id, new_token_ids=[], new_logprobs=kept)
                core.output_queue.put_nowait((request.client_index, EngineCoreOutputs(outputs=[output])))
        send_aborts(core, aborted)

    EngineCoreProc._send_abort_outputs = send
