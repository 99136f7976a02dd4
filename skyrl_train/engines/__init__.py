"""Inference engines: what the driver calls (`protocol`), the settings of all kinds (`settings`), vLLM engines (`vllm`)
and running vLLM servers (`remote`). Read `protocol` first, then `vllm/engine`.
"""
