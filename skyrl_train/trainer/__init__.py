"""The training loop: steps, evaluation, checkpoints, and which processes hold device memory in which phase.

Read `step` (one step), then `scorers`, `publisher` and `residency`, then `loop` and `trainer` (a run).
"""
