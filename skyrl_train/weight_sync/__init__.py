"""Moves named tensors from one sender to many receivers, packed into buckets, and verifies that they arrived.

    (name, tensor) ... -bucket.pack-> Bucket ... -transport-> Bucket -bucket.unpack-> (name, tensor) ... -> load

The folder knows neither the trainer nor the engine: torch and the standard library are its only imports.
"""
