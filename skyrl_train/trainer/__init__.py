"""The training loop: steps, evaluation, checkpoints, and who has the devices.

Read `trainer` (one step), then `loop`, `learner` and `residency`.
"""
