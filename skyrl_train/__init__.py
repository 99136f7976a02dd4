"""Reinforcement learning of language models with Ray, Megatron-core and vLLM."""
