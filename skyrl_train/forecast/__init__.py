"""Memory and time of a run before it starts, from a model's config.json, the configuration and a device's data sheet.
Read `memory` (trainer ranks: what a stage holds, and what its layers keep for the backward pass in `activations`),
`engines`, `duration`, then `forecast`, which puts them together, `choices` (values of keys that are left open) and
`proposals` (layouts). Measured constants are in readings.yaml.
"""
