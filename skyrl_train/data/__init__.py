"""Data sets: rows -> prompts or examples, with the chat template, in shuffled order.

Read `rows` and `mapping`, then `prompts` (reinforcement learning) or `sft` (fine-tuning), and `chat`.
"""
