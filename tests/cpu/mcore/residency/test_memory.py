"""What is offloaded leaves the memory, and comes back with every bit as it was."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from skyrl_train.megatron.policy import MegatronPolicy
from skyrl_train.megatron.residency.memory import Offloaded
from skyrl_train.megatron.residency.storages import ALIGNMENT, StorageBlock
from skyrl_train.megatron.scorer import MegatronScorer
from skyrl_train.megatron.verify.layout_check import Layout, Trial, share_of
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from tests.support.families import make_trial, write_family
from tests.support.layouts import layout
from tests.support.policies import build, everything

pytestmark = pytest.mark.slow


def storage_bytes(policy: MegatronPolicy) -> int:
    """Bytes behind all that, gradients included."""
    tensors = [t for module in policy.model.modules for t in (*module.parameters(), *module.buffers())]
    tensors += [p.main_grad for module in policy.model.modules for p in module.parameters()]
    for part in policy._optimizer.chained_optimizers:
        for group in part.optimizer.param_groups:
            for parameter in group["params"]:
                tensors += [parameter, *part.optimizer.state[parameter].values()]
    storages = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors}
    return sum(storages.values())


def optimizer_storages(policy: MegatronPolicy) -> int:
    """Storages of the optimizer's state and of its parameters that are not the model's."""
    model = {p.untyped_storage()._cdata for module in policy.model.modules for p in module.parameters()}
    tensors = [
        tensor
        for part in policy._optimizer.chained_optimizers
        for parameter, state in part.optimizer.state.items()
        for tensor in (parameter, *state.values())
    ]
    return len({tensor.untyped_storage()._cdata for tensor in tensors} - model)


def _offload_between_updates(rendezvous: Rendezvous, arguments: tuple[Trial, Layout, bool, bool]) -> dict[str, Any]:
    trial, one, bf16, moves = arguments
    policy, batch = build(rendezvous, trial, one, bf16=bf16)
    result: dict[str, Any] = {}
    if moves:  # before there is any Adam state
        policy.offload()
        policy.reload()
    policy.keep_old_logprobs(batch)
    policy.update(batch)
    before, num_bytes = everything(policy), storage_bytes(policy)
    if moves:
        result["optimizer"] = policy.offload("optimizer")
        policy.export(torch.float32)
        result["weights"] = policy.offload("weights")
        result["left"] = storage_bytes(policy)
        result["rotary tables"] = [
            each.forward.cache_info().currsize
            for root in policy.model.modules
            for each in root.modules()
            if hasattr(each.forward, "cache_info")
        ]
        result["again"] = policy.offload()
        result["reload"] = policy.reload()
        gradients = [p.main_grad for module in policy.model.modules for p in module.parameters()]
        result["gradients"] = max(float(g.abs().max()) for g in gradients)
        after = everything(policy)
        result["differ"] = [name for name in before if not torch.equal(before[name], after[name])]
        policy.offload()
        policy.reload("weights")
        policy.reload("optimizer")
        again = storage_bytes(policy)
        assert num_bytes <= again < num_bytes + ALIGNMENT * len(after), "what became one storage has gaps"
        result["bytes"] = again
        result["storages"] = optimizer_storages(policy)
    policy.keep_old_logprobs(batch)
    policy.update(batch)
    if moves:  # views of one storage by now
        policy.offload()
        policy.reload()
    policy.keep_old_logprobs(batch)
    report = policy.update(batch)
    return result | {"metrics": report.metrics, "state": everything(policy)}


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_family("qwen3_tied", tmp_path_factory.mktemp("dense"))


@pytest.mark.parametrize(
    ("processes", "sizes", "bf16"),
    [(1, {}, False), (2, {}, True), (2, {"pp": 2, "vpp": 2}, True)],
    ids=["fp32", "bf16 DP2", "bf16 PP2 VPP2"],
)
def test_updates_with_offloads_between_them_end_at_the_same_bits(
    processes: int, sizes: dict[str, Any], bf16: bool, dense: Path
):
    trial, one = make_trial(dense, [7, 30, 12, 9, 25, 40, 3, 18]), layout(processes, sizes)
    moved, stayed = (
        run_on_ranks(_offload_between_updates, (trial, one, bf16, moves), processes, timeout_s=120)
        for moves in (True, False)
    )
    for mine, theirs in zip(moved, stayed, strict=True):
        assert not mine["differ"]
        assert mine["left"] == 0, "every storage was emptied"
        assert mine["rotary tables"] and not any(mine["rotary tables"])
        assert mine["gradients"] == 0.0
        assert mine["storages"] == (2 if bf16 else 1), "copies, which were there at the first turn, and moments"
        assert mine["again"].num_bytes == 0, "what is away is not copied again"
        assert mine["metrics"] == theirs["metrics"]
        assert mine["state"].keys() == theirs["state"].keys()
        changed = [name for name, tensor in mine["state"].items() if not torch.equal(tensor, theirs["state"][name])]
        assert not changed


@pytest.mark.parametrize(("bf16", "copied", "all_bytes"), [(False, 3, 4), (True, 7, 9)], ids=["fp32", "bf16"])
def test_gradients_are_not_copied(bf16: bool, copied: int, all_bytes: int, dense: Path):
    """Per parameter 2 or 4 bytes of weight, 8 of moments, 4 of a float32 copy of a bfloat16 weight, 4 of gradient."""
    trial = make_trial(dense, [7, 30, 12, 9])
    (result,) = run_on_ranks(_offload_between_updates, (trial, layout(1, {}), bf16, True), 1, timeout_s=120)
    moved = result["optimizer"].num_bytes + result["weights"].num_bytes
    assert moved == result["reload"].num_bytes
    assert moved / result["bytes"] == pytest.approx(copied / all_bytes, rel=0.02)


def _use_while_away(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> dict[str, str]:
    trial, one = arguments
    policy, batch = build(rendezvous, trial, one, bf16=False)
    policy.offload("optimizer")
    found = {"update without optimizer": _error(policy.update, batch)}
    policy.offload()
    for name, args in {
        "update": (batch,),
        "prompt_logprobs": (batch,),
        "keep_old_logprobs": (batch,),
        "export": (torch.float32,),
        "save_hf": ("/nowhere",),
    }.items():
        found[name] = _error(getattr(policy, name), *args)
    return found


def _error(function: Any, *args: Any) -> str:
    try:
        function(*args)
    except Offloaded as error:
        return str(error)
    return "no error"


def test_using_what_is_offloaded_is_an_error_that_says_so(dense: Path):
    """A save while offloaded killed the process elsewhere (slime#1888)."""
    (found,) = run_on_ranks(_use_while_away, (make_trial(dense, [7, 30, 12, 9]), layout(1, {})), 1, timeout_s=120)
    assert "needs the optimizer of this rank" in found.pop("update without optimizer")
    assert "needs the weights and optimizer" in found.pop("update")
    assert len(found) == 4
    for name, message in found.items():
        assert message == f"{name} needs the weights of this rank, which are offloaded; reload first"


def _run_out_while_coming_back(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> list[Any]:
    trial, one = arguments
    policy, batch = build(rendezvous, trial, one, bf16=True)
    policy.keep_old_logprobs(batch)
    policy.update(batch)
    policy.offload()
    policy.reload()  # what is gathered is one storage by now
    before = everything(policy)
    policy.offload()
    policy.reload("weights")
    left, allocate = storage_bytes(policy), StorageBlock.allocate

    def run_out(block: StorageBlock) -> None:
        allocate(block)
        raise MemoryError("injected")

    StorageBlock.allocate = run_out  # type: ignore[method-assign]
    try:
        policy.reload("optimizer")
    except MemoryError as error:
        found = [str(error), storage_bytes(policy) - left, _error(policy.update, batch)]
    StorageBlock.allocate = allocate  # type: ignore[method-assign]
    policy.reload("optimizer")
    after = everything(policy)
    return [*found, [name for name in before if not torch.equal(before[name], after[name])]]


def test_a_part_for_which_memory_runs_out_takes_none_and_can_come_back_later(dense: Path):
    """Merged moments come first, then a gradient's storage fails."""
    arguments = (make_trial(dense, [7, 30, 12, 9]), layout(1, {}))
    ((error, more, missing, differ),) = run_on_ranks(_run_out_while_coming_back, arguments, 1, timeout_s=120)
    assert error == "injected" and more == 0 and differ == []
    assert "needs the optimizer of this rank" in missing


def _reference(rendezvous: Rendezvous, arguments: tuple[Trial, Layout]) -> dict[str, Any]:
    trial, one = arguments
    reference = MegatronScorer(rendezvous, trial.model_path, one.megatron, bf16=True, seed=1, temperature=1.0)
    batch = share_of(trial, one, reference.ranks)
    before = reference.logprobs(batch)
    moved = [(reference.offload(), reference.reload()) for _ in range(3)]
    after = reference.logprobs(batch)
    reference.offload()
    error = _error(reference.logprobs, batch)
    return {"before": before, "after": after, "moved": moved, "error": error}


def test_the_references_weights_are_copied_to_the_host_only_once(dense: Path):
    (result,) = run_on_ranks(_reference, (make_trial(dense, [7, 30, 12, 9]), layout(1, {})), 1, timeout_s=120)
    assert torch.equal(result["before"], result["after"])
    offloads, reloads = zip(*result["moved"], strict=True)
    assert offloads[0].num_bytes == reloads[0].num_bytes > 0
    assert offloads[1].num_bytes == offloads[2].num_bytes < 0.01 * offloads[0].num_bytes, "at most a few buffers"
    assert "reload first" in result["error"]


def _resident_bytes(rendezvous: Rendezvous, arguments: tuple[int]) -> list[int]:
    from skyrl_train.megatron.residency.memory import DeviceMemory

    module = torch.nn.Linear(arguments[0], 1024, bias=False).requires_grad_(False)
    memory = DeviceMemory([module])
    sizes = []
    for _ in range(3):
        memory.offload()
        sizes.append(_own_bytes())
        memory.reload()
        sizes.append(_own_bytes())
    return sizes


def _own_bytes() -> int:
    """Memory that this process has written to; the code of libraries may be paged out at any time."""
    (line,) = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("RssAnon")]
    return int(line.split()[1]) * 1024


def test_offloaded_memory_goes_back_to_the_system():
    """64 MiB of weights: beside the host copy, which stays, they are there or they are not.

    Counted from the first offload, which also gives back what the process has kept of earlier work.
    """
    (sizes,) = run_on_ranks(_resident_bytes, (16384,), 1, timeout_s=60)
    offloaded, mib = sizes[0], 2**20
    assert [round((size - offloaded) / mib / 64) for size in sizes] == [0, 1, 0, 1, 0, 1]
