"""The only folder that imports vLLM: engines, the worker side of the weight sync, and the router over several engines."""
