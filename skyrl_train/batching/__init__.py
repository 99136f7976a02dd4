"""Groups of samples -> one batch per data-parallel rank.

build.py: Groups -> ExperienceBatch; limits.py: size limits and cost of a micro-batch;
pack.py: assignment of samples to ranks and micro-batches (integers only); split.py: ExperienceBatch -> TrainBatches;
hinted.py: TrainBatches with other prompts, for teachers.
"""
