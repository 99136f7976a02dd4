"""Placement of the run's processes: one placement group with a bundle for each rank and engine."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import ray
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_train.cluster.session import cpu_environment, hub_environment
from skyrl_train.config.training import PolicyPlacementConfig

KINDS = ("CPU", "GPU")
ADVICE = (
    "Ask for fewer ranks or engines (trainer.placement.*, generator.num_inference_engines), lower "
    "trainer.placement.cpus_per_worker, or add nodes to the cluster"
)


class PlacementError(ValueError):
    """The cluster has no room for what the configuration asks."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Processes of one kind."""

    name: str
    """For messages: "policy ranks", ..."""
    count: int
    gpus_each: int
    """Devices per process if the cluster has GPUs."""


@dataclass(frozen=True, slots=True)
class Slot:
    """Position of one process."""

    strategy: PlacementGroupSchedulingStrategy
    num_cpus: float
    num_gpus: int
    shares: tuple[int, ...] = ()
    """Ranks of the first demand whose devices it uses, if it has none itself."""
    uses_gpus: bool = False
    """Whether it uses GPUs, its own or shared ones."""
    node: str = ""
    """Ray's id of its node."""

    def options(self) -> dict[str, Any]:
        return {
            "num_cpus": self.num_cpus,
            "num_gpus": self.num_gpus,
            "scheduling_strategy": self.strategy,
            "runtime_env": {"env_vars": hub_environment(self.node) | ({} if self.uses_gpus else cpu_environment())},
        }


class Placement:
    """Reserved bundles; `slots[name]` lists those of one demand, neighbours on the same node where possible."""

    def __init__(self, group: PlacementGroup, slots: dict[str, list[Slot]]) -> None:
        self._group, self.slots = group, slots

    @classmethod
    async def reserve(cls, demands: list[Demand], config: PolicyPlacementConfig, *, use_gpus: bool) -> Placement:
        """Reserve one bundle for each process.
        Raises: PlacementError, at once if the whole cluster is too small, after `timeout_s` if it is busy.
        """
        needed = [(demand, demand.gpus_each if use_gpus else 0) for demand in demands for _ in range(demand.count)]
        bundles = [{"CPU": config.cpus_per_worker} | ({"GPU": gpus} if gpus else {}) for _, gpus in needed]
        group = await _reserve(demands, bundles, config)
        nodes = placement_group_table(group)["bundles_to_node_id"]
        slots: dict[str, list[Slot]] = {demand.name: [] for demand in demands}
        for index in sorted(range(len(needed)), key=lambda index: (nodes[index], index)):
            demand, gpus = needed[index]
            scheduling = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            slot = Slot(scheduling, config.cpus_per_worker, gpus, uses_gpus=use_gpus, node=nodes[index])
            slots[demand.name].append(slot)
        return cls(group, slots)

    @classmethod
    async def reserve_shared(cls, demands: list[Demand], config: PolicyPlacementConfig, *, use_gpus: bool) -> Placement:
        """Reserve one bundle, with one device, for each process of the first demand. The others use these devices: a
        process of several devices is in the bundle of the first of them.

        Raises: PlacementError like `reserve`, and if a process of several devices would span two nodes.
        """
        first = demands[0]
        assert all(demand.count * demand.gpus_each == first.count for demand in demands)
        bundle = {"CPU": config.cpus_per_worker * len(demands)} | ({"GPU": 1} if use_gpus else {})
        group = await _reserve(demands, [bundle] * first.count, config)
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
                        f"trainer.placement.colocate_all is true, and one of the {demand.name} would use {width} "
                        f"devices on two nodes. Make the number of devices of each node a multiple of {width}"
                    )
                scheduling = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=order[start])
                shares = () if own else tuple(range(start, start + width))
                num_gpus = 1 if own and use_gpus else 0
                node = nodes[order[start]]
                slots[demand.name].append(Slot(scheduling, config.cpus_per_worker, num_gpus, shares, use_gpus, node))
        return cls(group, slots)

    def remove(self) -> None:
        remove_placement_group(self._group)


async def _reserve(
    demands: list[Demand], bundles: list[dict[str, float]], config: PolicyPlacementConfig
) -> PlacementGroup:
    total = {kind: sum(bundle.get(kind, 0) for bundle in bundles) for kind in KINDS}
    wanted = f"{', '.join(f'{demand.count} {demand.name}' for demand in demands)}: together {total['CPU']:g} CPUs"
    if total["GPU"]:
        wanted += f" and {total['GPU']:g} GPUs"
    _check_size(wanted, total, bundles)
    group = placement_group(bundles, strategy=config.strategy)
    try:
        await asyncio.wait_for(asyncio.wrap_future(group.ready().future()), config.timeout_s)
    except BaseException as error:
        remove_placement_group(group)
        if isinstance(error, TimeoutError):
            raise PlacementError(
                f"the run was not placed within trainer.placement.timeout_s={config.timeout_s:g} s: it asks for "
                f"{wanted}, and {_amount(ray.available_resources())} are free. Wait for other jobs to end. {ADVICE}"
            ) from None
        raise
    return group


def _amount(resources: Mapping[str, float]) -> str:
    return f"{resources.get('CPU', 0):g} CPUs and {resources.get('GPU', 0):g} GPUs"


def _check_size(wanted: str, total: dict[str, float], bundles: list[dict[str, float]]) -> None:
    cluster, nodes = ray.cluster_resources(), [node["Resources"] for node in ray.nodes() if node["Alive"]]
    if any(total[kind] > cluster.get(kind, 0) + 1e-6 for kind in KINDS):
        raise PlacementError(
            f"the run cannot be placed: it asks for {wanted}, and the cluster has {_amount(cluster)} in all. {ADVICE}"
        )
    for each in {tuple(bundle.items()): bundle for bundle in bundles}.values():
        room, count = sum(_room(node, each) for node in nodes), bundles.count(each)
        if room < count:
            raise PlacementError(
                f"the run cannot be placed: it asks for {wanted}, and the cluster's nodes, one by one, have room for "
                f"{room} of the {count} processes of {_amount(each)}. {ADVICE}"
            )


def _room(node: Mapping[str, float], bundle: Mapping[str, float]) -> int:
    """How often the bundle fits into the empty node."""
    return min((int((node.get(kind, 0) + 1e-6) / amount) for kind, amount in bundle.items() if amount), default=10**9)
