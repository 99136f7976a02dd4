"""The HTTP endpoint of an engine: OpenAI's routes, and what they report about policy versions."""
