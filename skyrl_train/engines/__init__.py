"""Inference engines: the settings that all kinds share, vLLM engines (`vllm`) and running vLLM servers (`remote`)."""
