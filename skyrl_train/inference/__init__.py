"""The only folder that imports vLLM: engines, the worker side of the weight sync, the router over the engines."""
