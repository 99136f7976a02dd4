"""The scheduler of an engine's core: vLLM's, with less work for each request and step. Read `scheduler` first."""
