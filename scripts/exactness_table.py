"""Measure every family under every layout against Hugging Face and write the tables of docs/readings/exactness.md.

    python -m scripts.exactness_table [--families qwen3_tied,mixtral] [--lora] [--check]

Takes about four minutes on two cores. With --lora it measures the gradients of adapters instead. Without --check the
table in docs/readings/exactness.md is replaced.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import tempfile
import time
import warnings
from dataclasses import replace
from pathlib import Path

os.environ.update(OMP_NUM_THREADS="1", TORCHDYNAMO_DISABLE="1", HF_HUB_OFFLINE="1")
ROOT = Path(__file__).parents[1]
warnings.simplefilter("ignore")

import torch  # noqa: E402
import transformers  # noqa: E402

from skyrl_train.megatron.verify.hf_reference import comparable, hugging_face  # noqa: E402
from skyrl_train.megatron.verify.layout_check import run_layout  # noqa: E402
from skyrl_train.megatron.verify.outcome import BFLOAT16, FLOAT32, Difference, Tolerance, compare  # noqa: E402
from tests.support.adapters import Adapted, write_adapter  # noqa: E402
from tests.support.families import FAMILIES, MOE, make_trial, write_family  # noqa: E402
from tests.support.layouts import DENSE, EXPERT, EXPERT_FOUR, FOUR, layout  # noqa: E402

PAGE = ROOT / "docs/readings/exactness.md"
BEGIN, END = "<!-- table -->\n", "<!-- end of table -->"
BEGIN_LORA, END_LORA = "<!-- table of adapters -->\n", "<!-- end of table of adapters -->"
HEADER = "| family | layout | gradient | worst tensor | logprobs | metrics |\n|---|---|---|---|---|---|\n"


def row(family: str, name: str, difference: Difference, bounds: Tolerance) -> str:
    values = (
        difference.gradient,
        difference.worst_tensor[1],
        difference.logprobs,
        difference.worst_metric[1],
    )
    cells = " | ".join(f"{value:.1e}" for value in values)
    sentence = "" if not bounds.exceeded(difference) else " **broken**"
    return f"| {family} | {name}{sentence} | {cells} |\n"


def rows(family: str, folder: Path) -> list[str]:
    """One row per layout in float32 against Hugging Face, and two in bfloat16 against one bfloat16 process."""
    trial = make_trial(write_family(family, folder / family))
    reference = hugging_face(trial)
    tables = EXPERT | EXPERT_FOUR if family in MOE else DENSE | FOUR
    lines = []
    for name, (processes, sizes) in tables.items():
        outcome = run_layout(trial, layout(processes, sizes))
        lines.append(row(family, name, compare(comparable(outcome, reference), reference), FLOAT32))
    half = replace(trial, bf16=True)
    single = run_layout(half, layout(1, {}))
    for name in ("EP2", "PP2", "CP2") if family in MOE else ("TP2 SP", "DP2", "CP2"):
        processes, sizes = tables[name]
        difference = compare(run_layout(half, layout(processes, sizes)), single)
        lines.append(row(family, f"{name}, bfloat16", difference, BFLOAT16))
    return lines


def adapter_rows(family: str, folder: Path) -> list[str]:
    """One row per layout in float32: gradients of A and B, against autograd through W + alpha / r B A."""
    path = write_family(family, folder / family)
    lora = write_adapter(folder / f"{family}_adapter", path)
    trial = replace(make_trial(path), lora=lora)
    reference = hugging_face(trial, model=Adapted(path, lora), gradients_of=Adapted.gradients)
    lines = []
    for name, (processes, sizes) in (EXPERT | EXPERT_FOUR if family in MOE else DENSE | FOUR).items():
        outcome = run_layout(trial, layout(processes, sizes))
        lines.append(row(family, name, compare(comparable(outcome, reference), reference), FLOAT32))
    return lines


def summary(lines: list[str]) -> list[str]:
    """Per family the largest values over its layouts in float32, and the number of layouts."""
    worst: dict[str, list[list[float]]] = {}
    for line in lines:
        _, family, name, *values, _ = (cell.strip() for cell in line.split("|"))
        if "bfloat16" not in name:
            worst.setdefault(family, []).append([float(value) for value in values])
    return [
        f"| {family} | {len(rows)} | {' | '.join(f'{max(column):.1e}' for column in zip(*rows, strict=True))} |\n"
        for family, rows in worst.items()
    ]


def write_page(lines: list[str], begin: str, end: str) -> None:
    """Replace what stands between the two marks of the page."""
    before, _, rest = PAGE.read_text().partition(begin)
    after = rest.partition(end)[2]
    versions = ", ".join(f"{name} {_version(name)}" for name in ("torch", "megatron-core", "mbridge", "transformers"))
    head = HEADER.replace("layout", "float32 layouts", 1)
    text = (
        f"Measured with {versions}. The largest values of each family over its layouts:\n\n"
        f"{head}{''.join(summary(lines))}\n"
        f"<details><summary>Every layout</summary>\n\n{HEADER}{''.join(lines)}\n</details>\n"
    )
    PAGE.write_text(f"{before}{begin}{text}{end}{after}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", default=",".join(FAMILIES), help="comma-separated")
    parser.add_argument("--lora", action="store_true", help="gradients of adapters")
    parser.add_argument("--check", action="store_true", help="print the table, do not write it")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    started, lines = time.monotonic(), []
    with tempfile.TemporaryDirectory() as folder:
        for family in arguments.families.split(","):
            lines += (adapter_rows if arguments.lora else rows)(family, Path(folder))
            print("".join(line for line in lines if line.startswith(f"| {family} |")), end="", flush=True)
    print(f"{len(lines)} rows in {time.monotonic() - started:.0f} s")
    if not arguments.check:
        write_page(lines, *((BEGIN_LORA, END_LORA) if arguments.lora else (BEGIN, END)))
    return int(any("**broken**" in line for line in lines))


def _version(package: str) -> str:
    from importlib.metadata import version

    return re.sub(r"\+.*", "", version(package))


if __name__ == "__main__":
    sys.exit(main())
