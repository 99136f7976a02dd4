"""Values of keys that a configuration leaves open, chosen for a kind of GPU from the forecast."""
