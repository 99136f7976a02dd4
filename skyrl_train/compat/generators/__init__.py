"""Generators of skyrl_train 0.4 as collectors of groups.

Read `types` (inputs and outputs), `outputs` (groups <-> outputs), `client` (requests to the engines), `collector`, then
`environments` and `functions` (what generators inherit and call).
"""
