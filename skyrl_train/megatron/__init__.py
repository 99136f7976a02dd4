"""The policy and the reference on Megatron-core. No other folder imports it. Read `policy`, then `model/`, `passes/`
and `weights/`."""
