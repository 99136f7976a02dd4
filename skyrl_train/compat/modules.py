"""Modules and names of skyrl_train 0.4: `module:attribute` below skyrl_train, or `!` and what replaces the name."""

from __future__ import annotations


def _from(module: str, *names: str) -> dict[str, str]:
    return {name: f"{module}:{name}" for name in names}


_TYPES = _from(
    "compat.generators.types",
    *("BatchMetadata", "ConversationType", "GeneratorInput", "GeneratorInterface", "GeneratorOutput"),
    *("TrainingPhase", "TrajectoryID", "TrajectoryOutput"),
)
_PLACEMENT = "!devices follow trainer.placement, and the run reserves them"
_ENGINES = "!engines follow generator; for another kind set generator.backend=module:attribute (docs/extending.md)"
_CREDIT = "!the driver calls the estimator of trainer.algorithm.advantage_estimator"
_UTILS = {
    **_from("compat.processes", "initialize_ray"),
    "Timer": "!the run times its phases (timing/*)",
    **_from("compat.settings", "validate_cfg"),
    **dict.fromkeys(
        ("get_ray_pg_ready_with_timeout", "ray_noset_visible_devices", "get_all_env_variables"), _PLACEMENT
    ),
}
_MAIN = {**_from("compat.experiment", "BasePPOExp"), **_from("compat.settings", "validate_cfg")}
_CLIENT = _from("compat.generators.client", "InferenceEngineClient")
OLD: dict[str, dict[str, str]] = {
    "skyrl_train.utils": _UTILS,
    "skyrl_train.utils.utils": _UTILS,
    "skyrl_train.utils.ppo_utils": {
        **_from(
            "compat.registries",
            *("AdvantageEstimator", "AdvantageEstimatorRegistry", "PolicyLossType", "PolicyLossRegistry"),
            *("register_advantage_estimator", "register_policy_loss", "sync_registries"),
        ),
        **_from("compat.losses", "reduce_loss", "masked_mean"),
        "compute_advantages_and_returns": _CREDIT,
        "normalize_advantages_dict": "!set trainer.algorithm.advantage_batch_normalize=true",
        "ppo_policy_loss": "!built-in losses are functions of one micro-batch's tokens (skyrl_train.algorithms.losses)",
    },
    "skyrl_train.utils.torch_utils": _from("compat.losses", "masked_mean"),
    "skyrl_train.dataset": _from("compat.dataset", "PromptDataset"),
    "skyrl_train.generators": {},
    "skyrl_train.generators.base": _TYPES,
    "skyrl_train.generators.utils": {
        **_from(
            "compat.generators.functions",
            *("get_response_ids_and_loss_mask_from_messages", "get_rollout_metrics"),
        ),
        "apply_overlong_filtering": "!set generator.apply_overlong_filtering=true",
        **dict.fromkeys(
            ("prepare_generator_input", "concatenate_generator_outputs"),
            "!the run calls generate once for each group, and joins the outputs",
        ),
        "get_metrics_from_generator_output": "!the run logs rewards and pass@k of all groups (reward/*)",
    },
    "skyrl_train.generators.skyrl_gym_generator": {
        **_TYPES,
        **_from("compat.generators.environments", "SkyRLGymGenerator"),
    },
    "skyrl_train.inference_engines": {},
    "skyrl_train.inference_engines.base": {
        **_from("compat.generators.types", "ConversationType", "InferenceEngineInput", "InferenceEngineOutput"),
        "InferenceEngineInterface": _CLIENT["InferenceEngineClient"],
    },
    "skyrl_train.inference_engines.inference_engine_client": _CLIENT,
    "skyrl_train.inference_engines.utils": _from("compat.generators.functions", "get_sampling_params_for_backend"),
    "skyrl_train.fully_async_trainer": _from("compat.trainer", "FullyAsyncRayPPOTrainer"),
}
"""Module that exists in 0.4 alone -> its names."""
ADDED: dict[str, dict[str, str]] = {
    "skyrl_train.trainer": _from("compat.trainer", "RayPPOTrainer"),
    "skyrl_train.config": {
        "SkyRLConfig": "config:Config",
        "GeneratorConfig": "config.generator:GeneratorConfig",
        "SkyRLGymConfig": "config.rl:SkyrlGymConfig",
        "AlgorithmConfig": "config.algorithm:AlgorithmConfig",
    },
    "skyrl_train.entrypoints.main_base": {**_MAIN, "create_remote_inference_engines_from_config": _ENGINES},
    "skyrl_train.entrypoints.main_generate": {
        "EvalOnlyEntrypoint": "!subclass skyrl_train.entrypoints.generation.Generation",
    },
}
"""Module that exists here too -> names that only 0.4 has."""
REFUSED: dict[str, str] = {
    "skyrl_train.training_batch": "samples are packed. Override postprocess_generator_output, or register an estimator",
    "skyrl_train.workers": "models are trained by Megatron ranks. For fine-tuning there is main_sft (docs/sft.md)",
    "skyrl_train.env_vars": "devices follow trainer.placement, with trainer.placement.timeout_s",
    "skyrl_train.distributed": "models are trained by Megatron ranks",
    "skyrl_train.utils.rate_limiter": "use asyncio.Semaphore in the generator",
    "skyrl_train.utils.profiler": "set torch_profiler_config of trainer.policy.megatron_config",
    "skyrl_train.utils.trainer_utils": "resuming follows trainer.resume_mode",
    "skyrl_train.utils.tracking": "trackers follow trainer.logger",
    "skyrl_train.inference_engines.remote_inference_engine": "set generator.remote_inference_engine_urls",
    "skyrl_train.inference_engines.ray_wrapped_inference_engine": "set generator.backend=module:attribute",
}
"""Module of 0.4 -> what replaces it."""
