"""The side of a weight sync that runs in vLLM's workers. Read `transfer`, `update`, then `layerwise` (slow path) and
`copy_plan` (fast path).
"""
