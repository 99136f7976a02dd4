"""What a step of a streaming run takes by its schedule alone: the buffer of real runs, an engine in virtual time.

    python -m benchmarks.studies.streaming_throughput [--gb-per-s 3350] [--update-s 6.1] [--lengths 64 4096]
        [--sequences 1024] [--sequence-us 7]

Qwen3-0.6B's shape, 64 prompts of 128 tokens x 8 samples. A decoding step takes STEP_S + --sequence-us for each running
sequence, of which there are --sequences at most, and reads the KV cache of all of them; STEP_S and 7 microseconds were
fitted to synchronous steps on one H100 (2026-11-25: 34.0 s of generation). A sync pauses the engine for PAUSE_S and has it compute the cache again.
"""

from __future__ import annotations

import argparse
import heapq
import random
import statistics
from collections import deque

from skyrl_train.rollout.streaming.buffer import Buffer

STEP_S, PREFILL_S, PAUSE_S = 0.0026, 0.000003, 0.1
CACHE_BYTES = 114_688
"""KV cache of one token."""
PROMPT, PROMPTS, SAMPLES = 128, 64, 8
STEPS, WARM_UP = 60, 10


def steps(bound: int, depth: int, args: argparse.Namespace) -> list[float]:
    """Seconds of each step."""
    shortest, longest = args.lengths
    rng, buffer = random.Random(1), Buffer[None](PROMPTS, bound, depth)
    waiting, running = deque[tuple[int, int]](), list[tuple[float, float, int]]()  # by the token at which each ends
    tickets, left, ends = {}, {}, list[float]()
    now, token, started, done_at = 0.0, 0.0, 0.0, None
    while len(ends) < STEPS + WARM_UP:
        while buffer.capacity:
            ticket = buffer.submit()
            tickets[ticket.number], left[ticket.number] = ticket, SAMPLES
            lengths = [round(shortest * (longest / shortest) ** rng.random()) for _ in range(SAMPLES)]
            waiting.extend((length, ticket.number) for length in lengths)
        while waiting and len(running) < args.sequences:
            length, number = waiting.popleft()
            heapq.heappush(running, (token + length, token, number))
            started, now = started + token, now + PROMPT / SAMPLES * PREFILL_S
        cached = len(running) * (token + PROMPT) - started
        ahead = min(16.0, running[0][0] - token) if running else 0.0
        step_s = STEP_S + 1e-6 * args.sequence_us * len(running) + CACHE_BYTES * cached / (args.gb_per_s * 1e9)
        if done_at is not None and (not running or now + ahead * step_s > done_at):
            token += max(0.0, done_at - now) / step_s if running else 0.0
            now, done_at = max(now, done_at) + PAUSE_S + cached * PREFILL_S, None
            buffer.end_step()
            ends.append(now)
        else:
            now, token = now + ahead * step_s, token + ahead
            while running and running[0][0] <= token + 1e-6:
                _, start, number = heapq.heappop(running)
                started, left[number] = started - start, left[number] - 1
                if not left[number]:
                    buffer.finish(tickets[number], None)
        if done_at is None and buffer.take() is not None:
            done_at = now + args.update_s
    return [later - end for end, later in zip(ends[WARM_UP - 1 :], ends[WARM_UP:], strict=False)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gb-per-s", type=float, default=3350.0, help="memory bandwidth of the engine's GPU")
    parser.add_argument("--update-s", type=float, default=6.1, help="seconds of an update")
    parser.add_argument("--lengths", type=int, nargs=2, default=(64, 4096), help="uniform in their logarithm")
    parser.add_argument("--sequences", type=int, default=1024, help="max_num_seqs")
    parser.add_argument("--sequence-us", type=float, default=7.0, help="of the host, for each sequence and step")
    args = parser.parse_args()
    shortest, longest = args.lengths
    lengths = [shortest * (longest / shortest) ** (n / 1000) for n in range(1001)]
    reads = PROMPTS * SAMPLES * statistics.mean(PROMPT * length + length**2 / 2 for length in lengths)
    print(f"reading the KV cache for a step: {reads * CACHE_BYTES / (args.gb_per_s * 1e9):.1f} s")
    print("| max_staleness | pipeline_depth | step s, mean | shortest | longest | times as fast |\n" + "|---" * 6 + "|")
    synchronous = statistics.mean(steps(0, 0, args))
    for bound, depth in ((0, 0), (1, 1), (2, 1), (2, 2), (4, 1), (4, 2), (4, 4)):
        found = steps(bound, depth, args)
        mean = statistics.mean(found)
        print(f"| {bound} | {depth} | {mean:.1f} | {min(found):.1f} | {max(found):.1f} | {synchronous / mean:.2f} |")


if __name__ == "__main__":
    main()
