"""Names of all metrics with unit and meaning, for the console, the report and `docs/tracking.md`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MetricName:
    """One metric, or a family of them where the name holds `{...}`."""

    name: str
    unit: str
    meaning: str


@dataclass(frozen=True, slots=True)
class Phase:
    """A timed part of the loop."""

    name: str
    """Name of its metric, `timing/{phase}`."""
    label: str
    in_step: bool
    """Part of `timing/step`; evaluation and exports happen between steps."""
    meaning: str


STEP_TIME = "timing/step"
PHASES = (
    Phase("timing/generate", "generate", True, "generation of the samples by engines and environments"),
    Phase("timing/convert_to_training_input", "prepare", True, "advantages, batches and their split over ranks"),
    Phase("timing/fwd_logprobs_values_reward", "forward", True, "old and reference logprobs"),
    Phase("timing/policy_train", "train", True, "forward, backward and optimizer steps"),
    Phase("timing/save_state", "state", True, "saving the trainer's state, to roll back a job (only in a service)"),
    Phase("timing/sync_weights", "sync", True, "sync of the new weights into the engines, with verification"),
    Phase("timing/eval", "evaluate", False, "evaluation on held-out prompts or rows"),
    Phase("timing/save_hf_model", "save", False, "export of a Hugging Face checkpoint"),
    Phase("timing/save_checkpoints", "checkpoint", False, "writing resumable checkpoints"),
)

WITHIN_PHASES = (
    MetricName(
        "timing/offload", "s", "offloading trainers from shared devices (release=exit: state is written, processes end)"
    ),
    MetricName(
        "timing/reload",
        "s",
        "reloading trainers to shared devices (release=exit: processes start); the optimizer follows during the update",
    ),
    MetricName("timing/engine_sleep", "s", "engines freeing shared devices"),
    MetricName("timing/engine_wake", "s", "engines allocating memory for weights and KV cache again"),
)
"""Times within phases."""

METRICS = (
    MetricName("trainer/global_step", "steps", "steps finished; 0 is the state before training"),
    MetricName("trainer/epoch", "passes", "pass over the training data, from 0"),
    MetricName("trainer/export_failed", "", "1 if the export of the step could not be written; absent if none was due"),
    MetricName("trainer/unix_time_s", "s", "time at which the line was written (only in metrics.jsonl)"),
    MetricName("service/job", "jobs", "number of the job (only in a service)"),
    MetricName("service/policy_version", "version", "version that the engines serve after the job (only in a service)"),
    MetricName("reward/avg_raw_reward", "reward", "mean reward of the step's samples, before any KL penalty"),
    MetricName("reward/avg_pass_at_{n}", "fraction", "groups of n samples with a positive reward among them"),
    MetricName("reward/mean_positive_reward", "reward", "mean reward, negative ones counted as 0"),
    MetricName("reward/zero_variance_share", "fraction", "groups whose rewards are all equal (no signal)"),
    MetricName("generate/batch_num_seq", "samples", "samples of the step"),
    MetricName("generate/num_failed_rollouts", "rollouts", "failed and dropped (only with generator.max_failed_share)"),
    MetricName("generate/num_failed_groups", "groups", "failed and replaced (only with generator.max_failed_share)"),
    MetricName(
        "generate/num_filtered_groups", "groups", "dropped for lack of signal (only with dynamic_sampling.type)"
    ),
    MetricName("generate/avg_num_tokens", "tokens", "sampled tokens per sample, mean"),
    MetricName("generate/min_num_tokens", "tokens", "the same, minimum"),
    MetricName("generate/max_num_tokens", "tokens", "the same, maximum"),
    MetricName("generate/std_num_tokens", "tokens", "the same, standard deviation"),
    MetricName("generate/avg_tokens_non_zero_rewards", "tokens", "the same, mean of samples with a positive reward"),
    MetricName("generate/avg_tokens_zero_rewards", "tokens", "the same, mean of samples with reward 0"),
    MetricName("generate/share_stopped_by_length", "fraction", "samples truncated by the length limit"),
    MetricName("generate/avg_turns", "turns", "turns of the policy per sample"),
    MetricName("environment/{key}", "", "metrics of the environments (`get_metrics`), aggregated by their class"),
    MetricName("environment/{env_class}/{key}", "", "the same if several classes have a metric of this name"),
    MetricName("loss/avg_final_rewards", "reward", "mean reward used for the advantages, after any KL penalty"),
    MetricName("loss/avg_raw_advantages", "", "advantage, mean over the sampled tokens"),
    MetricName("loss/avg_raw_advantages_abs", "", "its absolute value, mean over the same tokens"),
    MetricName("policy/final_loss", "loss", "the differentiated loss: sum of policy, KL, entropy and balancing terms"),
    MetricName("policy/policy_loss", "loss", "the policy-gradient term alone"),
    MetricName("policy/kl_loss", "loss", "the KL term, before its coefficient"),
    MetricName("policy/entropy_loss", "loss", "minus the weighted entropy, before its coefficient"),
    MetricName("policy/moe_aux_loss", "loss", "load-balancing loss of the routers, with its coefficient"),
    MetricName("policy/policy_entropy", "nats/token", "entropy of the policy's next-token distribution"),
    MetricName("policy/policy_kl", "nats/token", "estimated KL from the reference model, mean"),
    MetricName("policy/policy_kl_max", "nats/token", "the same, maximum over tokens"),
    MetricName("policy/approx_kl", "nats/token", "estimated KL from the policy at the start of the step"),
    MetricName("policy/policy_lr", "", "learning rate of the last optimizer step"),
    MetricName("policy/grad_norm", "", "gradient norm before clipping, mean over the optimizer steps"),
    MetricName("policy/num_optimizer_steps", "steps", "optimizer steps of this step; 0 if it had no signal"),
    MetricName("policy/num_skipped_steps", "steps", "of these, skipped because a gradient was not finite"),
    MetricName("policy/loss_metrics/clip_ratio", "fraction", "tokens whose probability ratio was clipped"),
    MetricName(
        "policy/rollout_train_logprobs_abs_diff_mean",
        "nats",
        "absolute difference of the engine's and the trainer's logprobs before the update, mean",
    ),
    MetricName("policy/rollout_train_logprobs_abs_diff_std", "nats", "the same, standard deviation"),
    MetricName("policy/rollout_train_logprobs_abs_diff_max", "nats", "the same, maximum"),
    MetricName(
        "policy/rollout_train_kl", "nats", "KL divergence from the engine to the trainer (k3), mean over tokens"
    ),
    MetricName(
        "policy/rollout_train_effective_share",
        "fraction",
        "effective sample size of the importance weights between them, over the number of tokens; 1 is no difference",
    ),
    MetricName(
        "policy/rollout_train_logprobs_compared",
        "fraction",
        "trained tokens of the current version, to which trainer.logprob_difference applies",
    ),
    MetricName("sft/loss", "nats/token", "cross entropy of the step's trained tokens before its update, mean over all"),
    MetricName("sft/eval_loss", "nats/token", "the same on the held-out rows"),
    MetricName("sft/num_tokens", "tokens", "tokens of the step's rows"),
    MetricName("sft/num_trained_tokens", "tokens", "of these, trained"),
    MetricName("eval/all/avg_score", "reward", "mean reward on all held-out prompts"),
    MetricName("eval/all/pass_at_{n}", "fraction", "held-out prompts with a positive reward among n samples"),
    MetricName("eval/all/mean_positive_reward", "reward", "mean held-out reward, negative ones counted as 0"),
    MetricName("eval/{data_source}/{score}", "", "the same scores on the prompts of one data source"),
    MetricName(STEP_TIME, "s", "one training step, wall clock"),
    *(MetricName(phase.name, "s", phase.meaning) for phase in PHASES),
    *WITHIN_PHASES,
    MetricName("perf/generate_tokens_per_s", "tokens/s", "sampled tokens per second of generation"),
    MetricName("perf/train_tokens_per_s", "tokens/s", "tokens of all samples per second of training"),
    MetricName(
        "perf/sync_gb_per_s", "GB/s", "weight bytes received by the engines per second of sync (GB = 1e9 bytes)"
    ),
    MetricName(
        "perf/mfu",
        "fraction",
        "model FLOPs of training over the devices' peak; absent if no peak is known, or for a part of a device (MIG). "
        "Gradients of all weights count, so with adapters, which need fewer, it is up to 1.5 times too high",
    ),
    MetricName("perf/pipeline_bubble", "fraction", "time in which a pipeline rank waits for its neighbours"),
    MetricName(
        "perf/offload_gb_per_s",
        "GB/s",
        "bytes per second that trainers offload from shared devices, all ranks together",
    ),
    MetricName(
        "memory/{phase}/{process}_gib",
        "GiB",
        "memory held by the largest policy or reference rank or engine worker in rollout, reference, training or sync: "
        "torch's reserved device memory, without a GPU the resident memory",
    ),
    MetricName("memory/{phase}/device_free_gib", "GiB", "free memory of the fullest device (without a GPU: machine)"),
    MetricName("perf/driver_share", "fraction", "time of the step outside generate, forward, train and sync"),
    MetricName("balance/dp_imbalance", "fraction", "work of the heaviest data-parallel rank over the mean, minus 1"),
    MetricName("balance/padding_share", "fraction", "padding among the padded tokens"),
    MetricName("balance/fill", "fraction", "fill of the micro-batches; above 1 if a sample exceeds the limit"),
    MetricName("balance/num_micro_batches", "", "micro-batches of each rank"),
    MetricName("balance/num_empty_micro_batches", "", "micro-batches without samples, of all ranks"),
)


def phases_of(metrics: Mapping[str, float]) -> list[Phase]:
    """Phases timed in `metrics`: known ones in the order of the loop, then others by name."""
    known = [phase for phase in PHASES if phase.name in metrics]
    names = {STEP_TIME, *(phase.name for phase in known), *(metric.name for metric in WITHIN_PHASES)}
    others = sorted(name for name in metrics if name.startswith("timing/") and name not in names)
    return known + [Phase(name, name.removeprefix("timing/").replace("_", " "), True, "") for name in others]


def is_documented(name: str) -> bool:
    """Whether METRICS has `name` or its family (`eval/all/pass_at_{n}`)."""
    families = (re.sub(r"\\{\w+\\}", "[^/]+", re.escape(metric.name)) for metric in METRICS)
    return any(re.fullmatch(family, name) for family in families)


def markdown_table() -> str:
    """All metrics as the table of `docs/tracking.md`."""
    rows = (f"| `{metric.name}` | {metric.unit} | {metric.meaning} |" for metric in METRICS)
    return "\n".join(["| name | unit | meaning |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(markdown_table())
