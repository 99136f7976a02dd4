"""Layers that replace Megatron's own: packed attention, experts, rotary embedding, norms and their gradients. Read
`layers` (which are installed where), then `attention` and `experts`.
"""
