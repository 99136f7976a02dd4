"""The calls that the driver makes to an engine, and the kinds of engines by name.

A new kind is a class, named here or as `module:Class` in generator.backend.

A kind of this package is imported in the engine's own process only; a `module:Class` also on the driver, which checks
its methods before anything starts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.engines.settings import EngineSettings, PauseMode
from skyrl_train.imports import imported
from skyrl_train.types import Generation, SamplingParams
from skyrl_train.weight_sync.control import ControlMessage


@dataclass(frozen=True, slots=True)
class EngineFacts:
    """Facts about an engine that has loaded its model."""

    num_workers: int
    """Processes that receive weights."""
    url: str | None = None
    """HTTP endpoint, if the engine has one."""
    scratch: str | None = None
    """Folder with the temporary files of its processes, removed when the engine dies."""


class EngineDeadError(RuntimeError):
    """The engine's core process ended; the engine must be replaced and receive the weights again."""


class Engine(Protocol):
    """One engine, in its own process.

    Order of a run: `start`; then per weight sync `begin_weight_update`, one `update_weights` from each sender,
    `finish_weight_update`, `resume`. The first sync, and each after a failure, begins with one `init_weight_sync` per
    sender. Where processes take turns on shared devices a sync comes after `sleep` and `wake_weights`, and before
    `wake_kv_cache`. Senders call `update_weights` through the engine's actor; the driver calls everything else.

    EngineDeadError or a timeout makes the driver replace the engine. Another error of `generate_batch` fails its
    requests; any other error ends the run.
    """

    def __init__(self, settings: EngineSettings) -> None: ...

    async def start(self, *, waits_for_weights: bool) -> EngineFacts:
        """Returns when it can generate. Args: waits_for_weights: stay paused until the first weight sync."""

    async def ping(self, timeout_s: float) -> None:
        """Returns when every worker has answered."""

    def generate_batch(
        self, requests: Sequence[tuple[int, list[int], SamplingParams]]
    ) -> AsyncIterator[list[tuple[int, Generation]]]:
        """Yield (index, generation) as requests finish. While the engine is paused, nothing starts.
        Args: requests: (index, prompt token ids, parameters).
        """

    async def prompt_logprobs(self, prompts: Sequence[list[int]]) -> list[list[float]]:
        """Per prompt the logprob of each token given those before it, at temperature 1; 0 for the first token."""

    async def pause(self, mode: PauseMode | None = None) -> None:
        """Stop generating until `resume`, and drop every cached prefix.

        Args: mode: keep freezes running requests (they continue with the new weights), wait lets them finish, abort
            ends them with the tokens they have; None for generator.pause_mode.
        """

    async def resume(self) -> None:
        """Raises: WeightSyncError while the weights are incomplete."""

    async def init_weight_sync(self, info: ControlMessage) -> None:
        """Connect to a sender of weights (`weight_sync.channels.table.open_receiver`)."""

    async def begin_weight_update(self) -> None:
        """Pause, and expect weights."""

    async def update_weights(self, message: ControlMessage) -> None:
        """Receive and load all tensors of one sender; one call per sender (pipeline stage) and update."""

    async def finish_weight_update(self, policy_version: int, sent_digests: dict[str, int]) -> None:
        """Serve the weights as this version. Raises: WeightSyncError if they do not match the digests."""

    async def sleep(self, *, keep_weights: bool = False) -> None:
        """Free the device. With keep_weights, `wake_weights` restores the weights from host memory; without, they are
        undefined until the next update.
        """

    async def wake_weights(self) -> None:
        """Allocate the memory of the weights again."""

    async def wake_kv_cache(self) -> None:
        """Allocate the memory of the KV cache again, and continue generating."""

    async def memory(self) -> list[dict[str, float]]:
        """Device memory of each worker, as `device.memory_in_use`; empty if unknown."""

    async def shutdown(self) -> None:
        """End everything that the engine has started."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineKind:
    """An engine class and the check of its configuration.

    The class may have two static methods: `prepare(settings)` does what is possible before its device is free, and
    `cause_of_death(log)` finds in the output of a process why it did not start.
    """

    engine: str
    """`module:Class`, an Engine."""
    problems: str | None = None
    """`module:function`: Config -> problems with it for this kind, as sentences."""


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
    """The kind that a configuration names; running servers are `remote`.
    Raises: ValueError for an unknown generator.backend, or a class that lacks methods.
    """
    name = generator.backend
    given = f"generator.backend is {name}"
    if not generator.run_engines_locally:
        if name != "vllm":
            raise ValueError(f"{given}: with generator.run_engines_locally=false it must be vllm")
        return ENGINES["remote"]
    if name == "vllm":
        return ENGINES["vllm"]
    if ":" not in name:
        raise ValueError(f"{given}: it must be vllm, or `module:Class` of your own engine (docs/extending.md)")
    found = imported("generator.backend", name)
    if isinstance(found, EngineKind):
        return found
    # A class that inherits from the protocol has its empty methods: they count as missing.
    methods = {name: method for name, method in vars(Engine).items() if not name.startswith("_")}
    if missing := [name for name, method in methods.items() if getattr(found, name, method) is method]:
        raise ValueError(f"{given}: the class has no {', '.join(missing)}. See skyrl_train/engines/protocol.py")
    return EngineKind(engine=name)
