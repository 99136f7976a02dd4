"""Which arguments of vLLM an experiment may not set by generator.engine_init_kwargs; as config_checks.py."""

from __future__ import annotations

from collections.abc import Iterator

from skyrl_train.config_generator import GeneratorConfig

OWN_KEYS = {
    "model": "trainer.policy.model.path",
    "served_model_name": "generator.served_model_name",
    "dtype": "generator.model_dtype",
    "seed": "trainer.seed",
    "tensor_parallel_size": "generator.inference_engine_tensor_parallel_size",
    "enable_lora": "trainer.policy.model.lora",
    "lora_target_modules": "trainer.policy.model.lora.target_modules",
    "max_loras": "trainer.policy.model.lora",
    "max_cpu_loras": "trainer.policy.model.lora",
    "max_lora_rank": "trainer.policy.model.lora.rank",
}
"""Set by these keys for trainer and engines alike, or each engine's own: engines with one seed draw the same."""
GIVEN = (
    "logprobs_mode",
    "weight_transfer_config",
    "worker_extension_cls",
    "scheduler_cls",
    "additional_config",
    "enable_sleep_mode",
    "pipeline_parallel_size",
    "data_parallel_size",
)
"""What training and weight syncs rest on: an engine is one vLLM core, with one worker per tensor-parallel rank."""


def engine_argument_problems(generator: GeneratorConfig) -> Iterator[str]:
    """Arguments that would set aside what the trainer counts on."""
    for name, value in generator.engine_init_kwargs.items():
        given = f"generator.engine_init_kwargs.{name} is {value!r}"
        if name in OWN_KEYS:
            yield f"{given}: leave it out and set {OWN_KEYS[name]}"
        elif name in GIVEN:
            yield f"{given}: leave it out, training relies on the value that the engines are given"
