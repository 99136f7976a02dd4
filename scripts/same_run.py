"""Do two checkouts train bit-identically? The proof of a refactoring.

    python scripts/same_run.py [--experiment NAME] [--steps 12] OLD_CHECKOUT NEW_CHECKOUT [OVERRIDES ...]
    python scripts/same_run.py . . --new trainer.source=streaming trainer.max_staleness=0

Model and data are made once, by the old checkout; then each checkout runs the experiment with the same seed in a folder
of its own and exports the model. Every metric of every step except times, and every weight, must have the same bits.
With --new the second run has further overrides, and the metrics that both runs have are compared.
Exit code 1 where one differs. On a CPU the quickstart and fine-tuning (`--experiment sft_quickstart`) repeat bit by
bit, so a checkout compared with itself shows no difference (docs/exactness.md, "Repeating a run").
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

MAIN, FINE_TUNING = "skyrl_train.entrypoints.main_base", "skyrl_train.entrypoints.main_sft"
PREPARE = "from skyrl_train.config import main_config; import pkgutil, sys; config = main_config(sys.argv[1:]); "
PREPARE += "pkgutil.resolve_name(config.trainer.prepare)(config)"
MEASURED = ("timing/", "perf/", "memory/", "env/")
"""Metrics of the machine, not of the training."""


def run(checkout: Path, folder: Path, program: Sequence[str]) -> None:
    environment = os.environ | {"PYTHONPATH": str(checkout), "OMP_NUM_THREADS": "1"}
    subprocess.run([sys.executable, *program], cwd=folder, env=environment, check=True)


def history(folder: Path) -> list[dict[str, Any]]:
    """The metrics of each step that do not depend on the machine."""
    (file,) = folder.glob("runs/*/metrics.jsonl")
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    return [{name: value for name, value in row.items() if not _is_measured(name)} for row in rows]


def _is_measured(name: str) -> bool:
    return name.startswith(MEASURED) or name in ("time", "timestamp", "trainer/unix_time_s")


def differences(old: Path, new: Path, *, common_only: bool) -> list[str]:
    """A line for each metric and tensor that is not the same. Args: common_only: leave out metrics of one run alone."""
    found = []
    rows, new_rows = history(old), history(new)
    if len(rows) != len(new_rows):
        found.append(f"{len(rows)} rows of metrics and {len(new_rows)}")
    for row, other in zip(rows, new_rows, strict=False):
        for name in sorted(row.keys() & other.keys() if common_only else row.keys() | other.keys()):
            if row.get(name) != other.get(name):
                found.append(f"row {row.get('trainer/global_step')}: {name} {row.get(name)} and {other.get(name)}")
    tensors, new_tensors = ({k: v for f in sorted(p.rglob("*.safetensors")) for k, v in load_file(f).items()}
                            for p in (old / "exports", new / "exports"))  # fmt: skip
    for name in sorted(tensors.keys() | new_tensors.keys()):
        if name not in tensors or name not in new_tensors or not tensors[name].equal(new_tensors[name]):
            found.append(f"weight {name}")
    print(f"{len(rows)} rows of {len(rows[-1])} metrics, {len(tensors)} tensors")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkouts", type=Path, nargs=2)
    parser.add_argument("--experiment", default="quickstart")
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--new", nargs="+", default=[], metavar="OVERRIDE", help="of the second run alone")
    parser.add_argument("overrides", nargs="*")
    given = parser.parse_args()
    old, new = (path.resolve() for path in given.checkouts)
    for checkout in (old, new):
        if not (checkout / "skyrl_train" / "__init__.py").exists():  # Python would run the installed package
            parser.error(f"{checkout} is no checkout: it has no skyrl_train/__init__.py (git worktree add makes one)")
    main_module = FINE_TUNING if given.experiment.startswith("sft") else MAIN
    overrides = [
        f"+experiment={given.experiment}",
        f"trainer.max_training_steps={given.steps}",
        f"trainer.hf_save_interval={given.steps}",
        "trainer.export_path=exports",
        *given.overrides,
    ]
    with tempfile.TemporaryDirectory() as root:
        made, *folders = (Path(root, name) for name in ("made", "old", "new"))
        made.mkdir()
        if main_module == MAIN:
            run(old, made, ["-c", PREPARE, *overrides])  # fine-tuning starts from a seeded model that each makes
        for checkout, folder, own in zip((old, new), folders, ([], given.new), strict=True):
            shutil.copytree(made, folder)
            run(checkout, folder, ["-m", main_module, *overrides, *own])
        found = differences(*folders, common_only=bool(given.new))
    print("\n".join(found) or "bit-identical")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
