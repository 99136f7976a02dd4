"""Hugging Face models, without Megatron and vLLM: folders, checkpoints, adapters and configurations.

Read `hub` and `download` (models of the hub), `ledger` (supported fields of config.json), `transformer_config` (fields
of Megatron that follow from them), then `shrink` (a small version of a configuration). `fingerprint` recognises
weights, `identity` the model of a checkpoint. `flops` is the cost of a token, for MFU and for balancing ranks.
"""
