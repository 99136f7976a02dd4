"""What the benchmarks share: models with random weights, jobs that are run and read back, ranks that measure.

Read `random_model`, then `policy_job` (a policy and a mini-batch from options) and `main_job` (whole runs).
"""
