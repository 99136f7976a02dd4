"""Speed and memory, measured. Commands, run from the root of the repository:

    python -m benchmarks.table        all numbers with a target on GPUs, through the commands below
    python -m benchmarks.step         an update or a whole step of a real model shape
    python -m benchmarks.streaming    synchronous and asynchronous runs
    python -m benchmarks.sync         a weight sync, part by part
    python -m benchmarks.memory       what a policy takes of its device, and how fast it leaves it
    python -m benchmarks.trl          a step beside TRL's
    python -m benchmarks.quickstart   whether the quickstart reaches its numbers
    python -m benchmarks.algorithms   whether each estimator, loss and correction learns

`lib` is what they share. `studies` are readings of one question at one time, kept for their numbers in docs; nobody
keeps them up to date: neither linter nor types nor CI look at them.
"""
