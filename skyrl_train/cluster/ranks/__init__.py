"""Groups of Megatron ranks as Ray actors.

Read `worker_group`, then `policy_group`.
"""
