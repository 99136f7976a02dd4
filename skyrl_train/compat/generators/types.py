"""Inputs and outputs of skyrl_train 0.4's generators and of its client of the engines."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypedDict

ConversationType = list[dict[str, str]]
TrainingPhase = Literal["train", "eval"]


class InferenceEngineInput(TypedDict, total=False):
    """Requests; one of `prompts` and `prompt_token_ids` is given."""

    prompts: list[ConversationType] | None
    prompt_token_ids: list[list[int]] | None
    sampling_params: dict[str, Any] | None
    """In vLLM's words."""
    session_ids: Sequence[int | str] | None


class InferenceEngineOutput(TypedDict):
    """Answers in the order of the requests."""

    responses: list[str]
    response_ids: list[list[int]]
    stop_reasons: list[str]
    response_logprobs: list[list[float]] | None


@dataclass
class TrajectoryID:
    """A sample of a row."""

    instance_id: str
    """Uid of the row."""
    repetition_id: int
    """0, 1, ... for the samples of one prompt."""

    def to_string(self) -> str:
        return f"{self.instance_id}_{self.repetition_id}"


@dataclass
class BatchMetadata:
    """The step that the samples are for."""

    global_step: int
    """From 1 in training; in an evaluation, the number of steps that the weights were trained."""
    training_phase: TrainingPhase


class GeneratorInput(TypedDict):
    """Prompts, each as often as it is sampled, as neighbours; here those of one group."""

    prompts: list[ConversationType]
    env_classes: list[str]
    env_extras: list[dict[str, Any]] | None
    sampling_params: dict[str, Any] | None
    trajectory_ids: list[TrajectoryID] | None
    batch_metadata: BatchMetadata | None


class GeneratorOutput(TypedDict, total=False):
    """Samples in the order of the inputs."""

    prompt_token_ids: list[list[int]]
    response_ids: list[list[int]]
    rewards: list[float] | list[list[float]]
    """One number for each sample, or for each token of its response."""
    loss_masks: list[list[int]]
    stop_reasons: list[str] | None
    rollout_metrics: dict[str, Any] | None
    rollout_logprobs: list[list[float]] | None
    trajectory_ids: list[TrajectoryID] | None
    is_last_step: list[bool] | None
    """Given where a trajectory is several samples, one for each of its steps."""


@dataclass
class TrajectoryOutput:
    """Result of `agent_loop`."""

    response_ids: list[int]
    reward: list[float] | float
    """One number for each token of the response, or one that its last token earns."""
    stop_reason: str
    loss_mask: list[int]
    prompt_ids: list[int]
    rollout_logprobs: list[float] | None
    env_metrics: dict[str, Any]


class GeneratorInterface(ABC):
    """Generates samples. Here `generate` is called once for each group."""

    @abstractmethod
    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Samples for all inputs."""
