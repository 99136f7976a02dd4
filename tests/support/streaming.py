"""A run on virtual time around a Buffer: no model, no asyncio, thousands of steps per second."""

from __future__ import annotations

import heapq
import math
import random
from dataclasses import dataclass, field

from skyrl_train.rollout.admission import Ledger
from skyrl_train.rollout.streaming.buffer import Buffer, Finished, Ticket

Prompts = Buffer[int]


@dataclass
class Simulation:
    """Latencies over three orders of magnitude, groups that fail or are filtered, updates, engine deaths, restarts."""

    size: int
    max_staleness: int
    depth: int
    seed: int = 0
    failed_share: float = 0.0
    restart_share: float = 0.0
    """Probability that the run is killed after a step and resumed from the checkpoint of that step."""
    death_share: float = 0.0
    """Probability that an engine dies in a step; what runs on it starts again on another, under the same ticket."""
    kind: type[Prompts] = Buffer
    buffer: Prompts = field(init=False)
    ledger: Ledger = field(init=False, default_factory=Ledger)
    max_seen: int = 0
    now: float = 0.0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.buffer = self._new_buffer(0)
        self.events: list[tuple[float, int, int]] = []
        """(time, generation of the process, ticket number)"""
        self.process = 0
        self.prompts: dict[int, int] = {}
        """Ticket number -> prompt, of running groups."""
        self.started: dict[int, int] = {}
        """Prompt -> step in which its group started last, kept apart from the tickets."""
        self.next_prompt = 0
        self.trained: set[int] = set()
        self.lost: set[int] = set()
        """Prompts of groups that failed or were filtered."""

    def run(self, num_steps: int) -> None:
        self.fill([])
        for _ in range(num_steps):
            self.step()
        pending = set(self.prompts.values()) | {finished.item for finished in self.buffer.ready.values()}
        assert self.trained | self.lost | pending == set(range(self.next_prompt)), "a prompt was lost"

    def step(self) -> None:
        while (batch := self.buffer.take()) is None:
            assert self.events, f"deadlock in step {self.buffer.step}: {self.buffer}"
            self.now, process, number = heapq.heappop(self.events)
            if process == self.process and number in self.prompts:
                self.end(self.buffer.running[number])
        assert len(batch) == self.size
        numbers = [finished.ticket.number for finished in batch]
        assert numbers == sorted(numbers), "the order of the tickets is that of the batch"
        for finished in batch:
            staleness = self.buffer.step - self.started[finished.item]
            assert 0 <= staleness <= self.max_staleness, f"staleness {staleness}: {self.buffer}"
            assert finished.item not in self.trained, "a group was trained twice"
            self.max_seen = max(self.max_seen, staleness)
            self.trained.add(finished.item)
        self.ledger.train(self.size)
        self.fill([])
        self.advance(self.random.expovariate(1.0))
        if self.random.random() < self.death_share:
            self.lose_engine()
        self.update()
        self.buffer.end_step()
        if self.random.random() < self.restart_share:
            self.restart()
        self.fill([])
        assert self.buffer.capacity == 0, "the engines are kept busy"
        assert len(self.buffer.untrained) == (self.depth + 1) * self.size, "after a resume as after a start"
        self.check()

    def update(self) -> None:
        """Running groups continue with the new weights."""

    def end(self, ticket: Ticket) -> None:
        prompt = self.prompts.pop(ticket.number)
        self.ledger.generated += 1
        if self.random.random() < self.failed_share:
            self.ledger.failed += 1
            self.lost.add(prompt)
            self.drop(ticket)
        else:
            self.ledger.waiting += 1
            self.buffer.finish(ticket, prompt)
        self.fill([])
        self.check()

    def drop(self, ticket: Ticket) -> None:
        self.buffer.drop(ticket)

    def check(self) -> None:
        self.ledger.check()
        assert self.ledger.waiting == len(self.buffer.ready)
        assert set(self.buffer.running) == set(self.prompts)

    def fill(self, pending: list[int]) -> None:
        while self.buffer.capacity:
            ticket = self.buffer.submit()
            prompt = pending.pop(0) if pending else self.next_prompt
            self.next_prompt += prompt == self.next_prompt
            self.prompts[ticket.number], self.started[prompt] = prompt, self.buffer.step
            self.send(ticket.number)
        assert not pending, "what was in flight fits again"

    def send(self, number: int) -> None:
        latency = math.exp(self.random.uniform(math.log(0.01), math.log(10)))
        heapq.heappush(self.events, (self.now + latency, self.process, number))

    def advance(self, seconds: float) -> None:
        """Let groups end during an update."""
        until = self.now + seconds
        while self.events and self.events[0][0] <= until:
            self.now, process, number = heapq.heappop(self.events)
            if process == self.process and number in self.prompts:
                self.end(self.buffer.running[number])
        self.now = until

    def lose_engine(self) -> None:
        """Half of the running groups start again; their earlier ends never come."""
        lost = {number for number in self.prompts if number % 2}
        self.events = [event for event in self.events if event[2] not in lost]
        heapq.heapify(self.events)
        for number in sorted(lost):
            self.send(number)

    def restart(self) -> None:
        """Finished groups are restored, and those that ran start again."""
        ready = [self.buffer.ready[number] for number in sorted(self.buffer.ready)]
        running = [self.prompts[number] for number in sorted(self.buffer.running)]
        self.process += 1
        self.events, self.prompts = [], {}
        self.buffer = self._new_buffer(self.buffer.step)
        left_out = self.buffer.restore([(each.ticket.step, each.step, each.item) for each in self.restored(ready)])
        assert left_out == 0, "the bound is that of before the restart"
        self.fill(self.resumed(running))

    def restored(self, ready: list[Finished[int]]) -> list[Finished[int]]:
        return ready

    def resumed(self, pending: list[int]) -> list[int]:
        return pending

    def _new_buffer(self, step: int) -> Prompts:
        return self.kind(self.size, self.max_staleness, self.depth, step=step)
