"""The source of asynchronous training.

Read `buffer` (the rule of staleness), then `streaming` (rollouts around it); `saved_groups` is what checkpoints keep,
`measures` what the log says of staleness and waiting.
"""
