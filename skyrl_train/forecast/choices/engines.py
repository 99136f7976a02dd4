"""Sizes of engines, for the samples that they may get at once."""

from __future__ import annotations

from collections.abc import Iterator

from transformers import PretrainedConfig

from skyrl_train.algorithms.tables import compares_with_greedy
from skyrl_train.config import Config
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.config.rl import VERIFYING_SAMPLES
from skyrl_train.device.kinds import DeviceKind
from skyrl_train.engines.settings import NUM_BYTES
from skyrl_train.forecast.choices.choice import Choice
from skyrl_train.forecast.duration import engine_step
from skyrl_train.forecast.forecast import workload_of
from skyrl_train.forecast.readings import readings
from skyrl_train.hf.flops import model_cost

PREFILLS = (8_192, 16_384)
"""Tokens of an engine step that are tried."""
OVERHEADS = 4
"""The arithmetic of such a step takes at least this many times as long as what it takes besides."""
MAX_SEQUENCES = 1_024
"""Sequences of an engine; the logits of more would take memory from its KV cache."""
ENOUGH_SEQUENCES = 512
"""More at once have to generate faster by MIN_GAIN: the samples of a streaming run grow older together."""
MIN_GAIN = 1.1
CAPTURED = 8
"""Numbers of sequences are multiples of it, like most sizes of CUDA graphs (engines/graphs.py)."""


def engine_choices(
    config: Config, model: PretrainedConfig, device: DeviceKind, samples_at_once: int
) -> Iterator[Choice]:
    generator = config.generator
    if generator.enforce_eager is None:
        yield Choice((("generator.enforce_eager", False),), "GPUs can run CUDA graphs")
    sequences = generator.max_num_seqs
    if sequences is None:
        sequences, reason = _sequences(config, model, device, samples_at_once)
        yield Choice((("generator.max_num_seqs", sequences),), reason)
    if generator.max_num_batched_tokens is None:
        yield _prefill(generator, model, device, sequences)


def _sequences(config: Config, model: PretrainedConfig, device: DeviceKind, samples_at_once: int) -> tuple[int, str]:
    """Sequences of an engine: those that it may get, or fewer if they generate as fast; and why."""
    generator = config.generator
    wanted, reason = samples_at_once, f"an engine may get {samples_at_once:,} samples at once"
    if generator.enable_http_endpoint or generator.rollout:
        who = "clients of the endpoint" if generator.enable_http_endpoint else "a rollout of your own"
        wanted, reason = MAX_SEQUENCES, f"{who} may send any number of requests"
    count = min(MAX_SEQUENCES, -(-wanted // CAPTURED) * CAPTURED)
    if count > ENOUGH_SEQUENCES:
        tp, width = generator.inference_engine_tensor_parallel_size, NUM_BYTES[generator.model_dtype]
        stored = generator.quantization
        many, few = (
            engine_step(model, tp, width, stored, n, workload_of(config), device.in_dtype(width), readings().generation)
            for n in (count, ENOUGH_SEQUENCES)
        )
        gain = count / many.seconds / (ENOUGH_SEQUENCES / few.seconds)
        reason += f", and {count:,} at once would be {gain:.2f} times as fast as {ENOUGH_SEQUENCES}"
        count = count if gain >= MIN_GAIN else ENOUGH_SEQUENCES
    if count < wanted and config.trainer.staleness > 0 and config.trainer.verify_sync_every > 0:
        # In a full engine they would wait for responses to end.
        return count + VERIFYING_SAMPLES, f"{reason} ({VERIFYING_SAMPLES} more for samples that verify a sync)"
    return count, reason


def samples_at_once(config: Config) -> int:
    """Samples of an engine in training, evaluation or both at once; those of a prompt stay together."""
    generator, trainer = config.generator, config.trainer
    engines = max(1, generator.num_rollout_engines)
    samples = generator.n_samples_per_prompt + compares_with_greedy(trainer.algorithm.advantage_estimator)
    training = -(-trainer.groups_in_flight * samples // engines) + samples
    if not config.data.val_data:
        return training
    evaluation = evaluated_at_once(config)
    if trainer.evaluates_beside and not generator.eval_num_engines:
        return training + evaluation
    return max(training, evaluation)


def evaluated_at_once(config: Config) -> int:
    generator = config.generator
    engines, samples = generator.eval_num_engines or generator.num_rollout_engines, generator.eval_n_samples_per_prompt
    return -(-config.trainer.eval_batch_size * samples // max(1, engines)) + samples


def _prefill(generator: GeneratorConfig, model: PretrainedConfig, device: DeviceKind, sequences: int) -> Choice:
    """The fewest tokens with which an engine's step over prompts is arithmetic, not overhead. Args: sequences: that run
    at the same time, at most.
    """
    constants = readings().generation
    device = device.in_dtype(NUM_BYTES[generator.model_dtype])
    speed = device.tflops * 1e12 * constants.arithmetic * generator.inference_engine_tensor_parallel_size
    seconds = {tokens: 2 * tokens * model_cost(model).matrix_weights / speed for tokens in PREFILLS}
    overhead = constants.step_s + constants.sequence_s * sequences
    tokens = next((tokens for tokens in PREFILLS if seconds[tokens] >= OVERHEADS * overhead), PREFILLS[-1])
    reason = f"a full step has {1e3 * seconds[tokens]:.0f} ms of arithmetic and {1e3 * overhead:.0f} of overhead"
    return Choice((("generator.max_num_batched_tokens", tokens),), reason)
