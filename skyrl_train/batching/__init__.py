"""From groups of samples to what each data-parallel rank computes on.

build.py: Groups -> ExperienceBatch; rules.py: what a micro-batch may hold and what it costs;
pack.py: which sample goes to which rank and micro-batch (integers only); split.py: ExperienceBatch -> TrainBatches.
"""
