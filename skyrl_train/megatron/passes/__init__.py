"""Forward and backward passes over micro-batches.

Read `packing` (samples to micro-batches), `step` (one pass of a mini-batch), then `logprobs` and `metrics`.
"""
