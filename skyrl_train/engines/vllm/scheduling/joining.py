"""When new requests join many that decode: several at a time.

A step in which prompts join costs about one step of decoding more: vLLM's scheduler and worker look at every request,
and there is no CUDA graph for the whole of it (21 to 27 ms instead of 12 with 500 requests of a model of 0.6 billion
parameters on an H200, docs/readings/gpu_performance.md). Where responses end one group after another, as in streaming
and in rollouts of several turns, that would be nearly every step.
"""

from __future__ import annotations

MANY = 128
"""With fewer running requests, new ones join at once."""
IDLE_SHARE = 0.25
"""They join when the requests that wait could have decoded this many tokens per running request. If L is the number of
steps of a request, that is every sqrt(2 * IDLE_SHARE * L)th step, where they end evenly: the best for a joining that
costs IDLE_SHARE steps, and near it for one that costs a tenth of that or four times as much.
"""
LONGEST = 16
"""Steps for which a request is held at most."""


class Joining:
    """Holds the requests that wait for a step, which would then be one of decoding alone."""

    def __init__(self) -> None:
        self._num_held, self._num_idle = 0, 0

    def is_held(self, num_running: int, num_ready: int) -> bool:
        """Whether the next step is made without new requests.
        Args: num_ready: of those that wait and have a free slot, at least 1.
        """
        self._num_held += 1
        self._num_idle += num_ready
        return num_running >= MANY and self._num_held <= LONGEST and self._num_idle < IDLE_SHARE * num_running

    def reset(self) -> None:
        """To be called when requests have joined."""
        self._num_held, self._num_idle = 0, 0
