"""Policy, critic, reference and teachers on Megatron-core. Read `policy`, then `model/`, `passes/`
and `weights/`.
"""
