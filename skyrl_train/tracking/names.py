"""The names of all metrics, with unit and meaning, for the console, the report and `docs/tracking.md`."""

from __future__ import annotations

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
    """Of its metric, `timing/{phase}`."""
    label: str
    """What people see."""
    in_step: bool
    """Part of `timing/step`; evaluation and exports happen between steps."""
    meaning: str


STEP_TIME = "timing/step"
PHASES = (
    Phase("timing/generate", "generate", True, "engines and environments make the samples"),
    Phase("timing/convert_to_training_input", "prepare", True, "advantages, batches and their split over ranks"),
    Phase("timing/fwd_logprobs_values_reward", "forward", True, "old and reference logprobs"),
    Phase("timing/policy_train", "train", True, "forward, backward and optimizer steps"),
    Phase("timing/sync_weights", "sync", True, "new weights into the engines, with their verification"),
    Phase("timing/eval", "evaluate", False, "evaluation on held-out prompts"),
    Phase("timing/save_hf_model", "save", False, "export of a Hugging Face checkpoint"),
)

METRICS = (
    MetricName("trainer/global_step", "steps", "steps finished; 0 is the state before training"),
    MetricName("trainer/epoch", "passes", "pass over the training data, from 0"),
    MetricName("trainer/unix_time_s", "s", "when the line was written (metrics.jsonl only)"),
    MetricName("reward/avg_raw_reward", "reward", "mean reward of the step's samples, before any KL penalty"),
    MetricName("reward/avg_pass_at_{n}", "share", "prompts with at least one positive reward among their n samples"),
    MetricName("generate/avg_num_tokens", "tokens", "mean tokens that the policy wrote per sample"),
    MetricName("generate/max_num_tokens", "tokens", "most tokens that the policy wrote in one sample"),
    MetricName("generate/batch_num_seq", "samples", "samples of the step"),
    MetricName("policy/final_loss", "loss", "what was differentiated: policy loss, KL and entropy terms"),
    MetricName("policy/policy_loss", "loss", "the clipped policy-gradient term alone"),
    MetricName("policy/policy_entropy", "nats/token", "entropy of the policy's next-token distribution"),
    MetricName("policy/policy_kl", "nats/token", "estimated KL from the reference model"),
    MetricName("policy/policy_lr", "", "learning rate of the last optimizer step"),
    MetricName("policy/grad_norm", "", "gradient norm before clipping, mean over optimizer steps"),
    MetricName("policy/loss_metrics/clip_ratio", "share", "tokens whose probability ratio was clipped"),
    MetricName(
        "policy/rollout_train_logprobs_abs_diff_mean",
        "nats",
        "mean |engine's - trainer's logprob| of the same tokens under the same weights",
    ),
    MetricName("policy/rollout_train_logprobs_abs_diff_max", "nats", "the largest such difference"),
    MetricName("eval/all/avg_score", "reward", "mean reward on all held-out prompts"),
    MetricName("eval/all/pass_at_{n}", "share", "held-out prompts with a positive reward among n samples"),
    MetricName("eval/{data_source}/avg_score", "reward", "mean reward on one data source"),
    MetricName("eval/{data_source}/pass_at_{n}", "share", "pass@n on one data source"),
    MetricName(STEP_TIME, "s", "one training step, wall clock"),
    *(MetricName(phase.name, "s", phase.meaning) for phase in PHASES),
    MetricName("perf/generate_tokens_per_s", "tokens/s", "tokens written by the policy per second of generation"),
    MetricName("perf/train_tokens_per_s", "tokens/s", "tokens of all samples per second of training"),
    MetricName(
        "perf/sync_gb_per_s", "GB/s", "weight bytes that reached the engines per second of sync (1 GB = 1e9 bytes)"
    ),
    MetricName("perf/mfu", "share", "model FLOPs of training over the devices' peak; absent where no peak is known"),
    MetricName("perf/pipeline_bubble", "share", "time that a pipeline rank waits for its neighbours"),
    MetricName("perf/driver_share", "share", "of the step, outside generate, forward, train and sync"),
    MetricName("balance/dp_imbalance", "share", "work of the heaviest data-parallel rank over the mean, minus 1"),
)


def phases_of(metrics: Mapping[str, float]) -> list[Phase]:
    """The phases that `metrics` holds times of: known ones in the order of the loop, then others by their own name."""
    known = [phase for phase in PHASES if phase.name in metrics]
    names = {STEP_TIME, *(phase.name for phase in known)}
    others = sorted(name for name in metrics if name.startswith("timing/") and name not in names)
    return known + [Phase(name, name.removeprefix("timing/").replace("_", " "), True, "") for name in others]
