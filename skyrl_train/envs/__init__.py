"""Environments. Importing this package puts the built-in ones into skyrl-gym's registry."""

from skyrl_train.envs.registry import register_built_in

register_built_in()
