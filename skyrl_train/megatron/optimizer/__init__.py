"""The optimizer step: Adam without a GPU, the learning rate, steps with gradients that are not finite."""
