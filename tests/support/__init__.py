"""What tests share: tiny models and their tokenizers, layouts and whole jobs to run, fakes, and planted faults."""
