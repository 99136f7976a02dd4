"""When requests that wait join many that decode: several at a time.

A step in which prompts join takes as long as two or three of decoding: vLLM's scheduler and worker look at every
request, and no CUDA graph covers the whole step. Where responses end one group after another, as in streaming and in
rollouts of several turns, that would be nearly every step (benchmarks/studies/scheduler_time.py --turnover).
"""

from __future__ import annotations

MANY = 128
"""With fewer running requests, others join at once."""
FEW = 0.25
"""They also join at once if more slots than this share of the running requests are free."""
COST = 1.0
"""Held requests join when they have missed as many tokens as all running requests decode in so many steps. Where
requests of L steps end evenly, they join every sqrt(2 COST L)th, which is best if a step that requests join takes as
long as 1 + COST others. On H200s it took as long as three; with two instead little is lost, and requests wait less.
"""
LONGEST = 24
"""Steps for which requests are held at most."""


class Joining:
    """Decides in which steps waiting requests may join, and holds them in the others, which only decode."""

    def __init__(self) -> None:
        self._num_held, self._num_missed = 0, 0

    def joins(self, num_running: int, num_free: int, num_waiting: int) -> bool:
        """Whether requests that wait may join the next step; if not, it counts as one in which they are held.
        Args: num_free: slots.
        """
        num_ready = min(num_free, num_waiting)
        if num_ready == 0:
            self.reset()
            return False
        self._num_held += 1
        self._num_missed += num_ready
        is_full = num_running >= MANY and num_free <= FEW * num_running
        return not is_full or self._num_held > LONGEST or self._num_missed >= COST * num_running

    def reset(self) -> None:
        """To be called when requests have joined: those that wait are held from now on."""
        self._num_held, self._num_missed = 0, 0
