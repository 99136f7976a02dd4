"""LoRA adapters on Megatron's layers. Read `adapters`, then `attach`."""
