"""Moves named tensors from one sender to many receivers, packed into buckets, and verifies that they arrived.

    (name, tensor) ... -bucket.fill-> Bucket ... -transport-> Bucket -bucket.unpack-> (name, tensor) ... -> load

The folder knows neither the trainer nor the engine. Read `transport` (both ends), then `bucket`, `digest` and one of
`channels`.
"""
