"""What the driver needs of an engine, and the kinds of engines by name. A new one is a class, and a line here or its
`module:Class` in generator.backend.

Imports no engine: the kind is checked before anything starts, and the class is imported in the engine's own process.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.engines.settings import EngineSettings, PauseMode
from skyrl_train.imports import imported
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.control import ControlMessage


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """An engine that has loaded its model."""

    num_workers: int
    """Processes that receive weights."""
    url: str | None = None
    """Of the HTTP endpoint that it offers, if any."""
    scratch: str | None = None
    """Folder with the temporary files of its processes."""


class EngineDeadError(RuntimeError):
    """The engine's core process ended; the engine must be replaced and given its weights again."""


class Engine(Protocol):
    """One engine, in a process of its own. A call that raises EngineDeadError, or is not answered, costs the engine;
    any other error is one of the request, or ends the run."""

    def __init__(self, settings: EngineSettings) -> None: ...

    async def start(self, *, waits_for_weights: bool) -> EngineFacts:
        """Returns when it can generate. Args: waits_for_weights: answer nobody before the first weight sync."""

    async def ping(self, timeout_s: float) -> None:
        """Returns when every worker has answered."""

    def generate_batch(
        self, requests: Sequence[tuple[int, list[int], SamplingParams]]
    ) -> AsyncIterator[list[tuple[int, Generation]]]:
        """Answers to (index, prompt token ids, parameters), with their indices, as they end. Nothing starts while the
        engine is paused."""

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Per prompt the logprob of each token given those before it, at temperature 1; 0 for the first token."""

    async def pause(self, mode: PauseMode | None = None) -> None:
        """Stop generating until `resume`, and forget every cached prefix. Args: mode: None for that of the settings."""

    async def resume(self) -> None:
        """Raises: WeightSyncError while the weights are not complete."""

    async def init_weight_sync(self, info: ControlMessage) -> None:
        """Join a sender of weights (`weight_sync.channels.table.open_receiver`)."""

    async def begin_weight_update(self) -> None:
        """Pause, and expect weights."""

    async def update_weights(self, message: ControlMessage) -> None:
        """Load all that one sender sends."""

    async def finish_weight_update(self, policy_version: int, sent_digests: dict[str, int]) -> Any:
        """Serve the weights as this version. Raises: WeightSyncError if they are not those of the digests."""

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the device; weights come back from host memory if kept, else with the next update."""

    async def wake_weights(self) -> None:
        """Memory for the weights again."""

    async def wake_kv_cache(self) -> None:
        """Memory for the KV cache again; generation continues."""

    async def memory(self) -> list[dict[str, float]]:
        """What each worker holds, as `device.memory_in_use`; empty if it does not say."""

    async def shutdown(self) -> None:
        """End what the engine has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """How engines of one kind are made and checked.

    The class may have `prepare(settings)`, a static method that does what can be done before its device is free, and
    `cause_of_death(log)`, one that finds in what a process has printed why it did not start.
    """

    engine: str
    """`module:Class`, an Engine."""
    problems: str | None = None
    """`module:function`: Config -> what is wrong with it for this kind, as sentences with the cure."""


_CHECKS = "skyrl_train.checks.engines"
ENGINES: dict[str, EngineKind] = {
    "vllm": EngineKind(
        engine="skyrl_train.engines.vllm.engine:VllmEngine", problems=f"{_CHECKS}:local_engine_problems"
    ),
    "remote": EngineKind(
        engine="skyrl_train.engines.remote.engine:RemoteEngine", problems=f"{_CHECKS}:remote_engine_problems"
    ),
}


def engine_kind(generator: GeneratorConfig) -> EngineKind:
    """The kind that a configuration asks for: servers that run already are `remote`.

    Raises: ValueError with what generator.backend may be, or what the class that it names lacks.
    """
    name = generator.backend if generator.run_engines_locally else "remote"
    if name in ENGINES:
        return ENGINES[name]
    given = f"generator.backend is {name}"
    if ":" not in name:
        raise ValueError(f"{given}: it must be vllm, or `module:Class` of an engine of your own")
    found = imported("generator.backend", name)
    if isinstance(found, EngineKind):
        return found
    if missing := [method for method in vars(Engine) if not method.startswith("_") and not hasattr(found, method)]:
        raise ValueError(f"{given}, which has no {', '.join(missing)}: see skyrl_train/engines/protocol.py")
    return EngineKind(engine=name)
