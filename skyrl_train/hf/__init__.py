"""Knowledge about Hugging Face models that needs neither Megatron nor vLLM.

Read `ledger` (which fields of a config.json are computed as Hugging Face computes them), then `shrink` (the same
configuration made small). `flops` says what a token costs, for MFU and for balancing ranks.
"""
