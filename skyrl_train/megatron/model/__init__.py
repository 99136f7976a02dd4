"""From a Hugging Face checkpoint to a Megatron model: families, parallel groups and pipeline stages. Read `model`, then
`bridge` and `families`.
"""
