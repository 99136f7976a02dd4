"""The optimizer: `optimizer` builds it, sets the learning rate and steps; `adam` is Adam without Transformer Engine."""
