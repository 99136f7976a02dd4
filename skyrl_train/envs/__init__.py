"""Environments. Importing this package registers the built-in ones in skyrl-gym."""

from skyrl_train.envs.registry import register_built_in

register_built_in()
