"""The source of asynchronous training.

Read `buffer` (the staleness bound), then `streaming` (the source). `saved_groups` stores finished groups in
checkpoints, `measures` computes metrics of staleness and waiting, `watchdog` explains a stall.
"""
