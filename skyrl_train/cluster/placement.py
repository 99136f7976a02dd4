"""Room for the run's processes: one placement group with a bundle for each rank and engine."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_train.cluster.session import cpu_environment
from skyrl_train.config.training import PolicyPlacementConfig


class PlacementError(ValueError):
    """The cluster has no room for what the configuration asks."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Processes of one kind."""

    name: str
    """For messages: "policy ranks", ..."""
    count: int
    gpus_each: int
    """Devices of one process where the cluster has GPUs."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Where one process is placed."""

    strategy: PlacementGroupSchedulingStrategy
    num_cpus: float
    num_gpus: int
    shares: tuple[int, ...] = ()
    """Ranks of the first demand whose devices it uses, where it has none of its own."""
    uses_gpus: bool = False
    """Also where they are another's."""

    def options(self) -> dict[str, Any]:
        """Of the Ray actor that is to be here."""
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "scheduling_strategy": self.strategy,
            "runtime_env": {"env_vars": {} if self.uses_gpus else cpu_environment()},
        }


def terms(config: PolicyPlacementConfig, use_gpus: bool) -> dict[str, Any]:
    """Keyword arguments of `Placement.reserve`."""
    return {
        "use_gpus": use_gpus,
        "cpus_each": config.cpus_per_worker,
        "strategy": config.strategy,
        "timeout_s": config.timeout_s,
    }


class Placement:
    """The reserved bundles; `slots[name]` lists those of one demand, neighbours on the same node where possible."""

    def __init__(self, group: PlacementGroup, slots: dict[str, list[Slot]]) -> None:
        self._group, self.slots = group, slots

    @classmethod
    async def reserve(
        cls, demands: list[Demand], *, use_gpus: bool, cpus_each: float, strategy: str, timeout_s: float
    ) -> Placement:
        """Raises: PlacementError, at once where the whole cluster is too small, after `timeout_s` where it is busy."""
        needed = [(demand, demand.gpus_each if use_gpus else 0) for demand in demands for _ in range(demand.count)]
        bundles = [{"CPU": cpus_each} | ({"GPU": gpus} if gpus else {}) for _, gpus in needed]
        group = await _reserve(demands, bundles, strategy, timeout_s)
        nodes = placement_group_table(group)["bundles_to_node_id"]
        slots: dict[str, list[Slot]] = {demand.name: [] for demand in demands}
        order = sorted(range(len(needed)), key=lambda index: (demands.index(needed[index][0]), nodes[index], index))
        for index in order:
            demand, gpus = needed[index]
            scheduling = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            slots[demand.name].append(Slot(scheduling, cpus_each, gpus, uses_gpus=use_gpus))
        return cls(group, slots)

    @classmethod
    async def reserve_shared(
        cls, demands: list[Demand], *, use_gpus: bool, cpus_each: float, strategy: str, timeout_s: float
    ) -> Placement:
        """One bundle, with one device, for each process of the first demand. The others use the devices of those: a
        process that asks for several lies beside the first of them.

        Raises: PlacementError as `reserve`, and if a process of several devices would lie on two nodes.
        """
        first = demands[0]
        assert all(demand.count * demand.gpus_each == first.count for demand in demands)
        bundle = {"CPU": cpus_each * len(demands)} | ({"GPU": 1} if use_gpus else {})
        bundles = [bundle] * first.count
        group = await _reserve(demands, bundles, strategy, timeout_s)
        nodes = placement_group_table(group)["bundles_to_node_id"]
        order = sorted(range(first.count), key=lambda index: (nodes[index], index))
        slots: dict[str, list[Slot]] = {}
        for demand in demands:
            width, own = demand.gpus_each, demand is first
            slots[demand.name] = []
            for start in range(0, first.count, width):
                if len({nodes[index] for index in order[start : start + width]}) > 1:
                    remove_placement_group(group)
                    raise PlacementError(
                        f"one of the {demand.name} uses {width} devices and would lie on two nodes: with "
                        "trainer.placement.colocate_all the devices of each node must be a multiple of that"
                    )
                scheduling = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=order[start])
                shares = () if own else tuple(range(start, start + width))
                slots[demand.name].append(Slot(scheduling, cpus_each, 1 if own and use_gpus else 0, shares, use_gpus))
        return cls(group, slots)

    def remove(self) -> None:
        remove_placement_group(self._group)


async def _reserve(
    demands: list[Demand], bundles: list[dict[str, float]], strategy: str, timeout_s: float
) -> PlacementGroup:
    _check_size(demands, bundles)
    group = placement_group(bundles, strategy=strategy)
    try:
        await asyncio.wait_for(asyncio.wrap_future(group.ready().future()), timeout_s)
    except BaseException as error:
        remove_placement_group(group)
        if isinstance(error, TimeoutError):
            raise PlacementError(_busy(demands, bundles, timeout_s)) from None
        raise
    return group


def _total(bundles: list[dict[str, float]]) -> dict[str, float]:
    return {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in ("CPU", "GPU")}


def _asked(demands: list[Demand], bundles: list[dict[str, float]]) -> str:
    parts = ", ".join(f"{demand.count} {demand.name}" for demand in demands)
    total = _total(bundles)
    return f"{parts}: together {total['CPU']:g} CPUs" + (f" and {total['GPU']:g} GPUs" if total["GPU"] else "")


def _has(resources: dict[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"


def _advice() -> str:
    return (
        "ask for fewer ranks or engines (trainer.placement.*, generator.num_inference_engines), lower "
        "trainer.placement.cpus_per_worker, or add nodes to the cluster"
    )


def _check_size(demands: list[Demand], bundles: list[dict[str, float]]) -> None:
    cluster = ray.cluster_resources()
    largest = {
        kind: max(node["Resources"].get(kind, 0) for node in ray.nodes() if node["Alive"]) for kind in ("CPU", "GPU")
    }
    total = _total(bundles)
    short = [kind for kind in ("CPU", "GPU") if total[kind] > cluster.get(kind, 0) + 1e-6]
    wide = [kind for kind in ("CPU", "GPU") if max(bundle.get(kind, 0) for bundle in bundles) > largest[kind] + 1e-6]
    if short or wide:
        what = "in all" if short else "on its largest node"
        have = cluster if short else largest
        raise PlacementError(
            f"the run cannot be placed: it asks for {_asked(demands, bundles)}, and the cluster has {_has(have)} "
            f"{what}; {_advice()}"
        )


def _busy(demands: list[Demand], bundles: list[dict[str, float]], timeout_s: float) -> str:
    return (
        f"the run was not placed within trainer.placement.timeout_s={timeout_s:g} s: it asks for "
        f"{_asked(demands, bundles)}, and {_has(ray.available_resources())} are free; wait for other jobs to end, or "
        f"{_advice()}"
    )
