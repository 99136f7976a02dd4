"""The command `skyrl-train`: short names of the programs, `skyrl-train train +experiment=NAME` and so on."""

from __future__ import annotations

import difflib
import runpy
import sys
from collections.abc import Sequence

PROGRAMS = {
    "train": ("main_base", "train by reinforcement learning"),
    "sft": ("main_sft", "fine-tune on examples"),
    "generate": ("main_generate", "evaluate a model or a checkpoint"),
    "export": ("export_hf", "write the model of a checkpoint in Hugging Face format"),
    "serve": ("main_service", "start a training service for external agents"),
    "plan": ("plan", "forecast memory and time, and propose a layout"),
    "verify": ("verify_layout", "compare a parallel layout with Hugging Face"),
    "verify-template": ("verify_template", "check a chat template for conversations of several turns"),
}
"""Command -> module of entrypoints, and what it does."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program that the first argument names, as `python -m` does. Raises: SystemExit."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(usage())
        raise SystemExit(0 if arguments else 2)
    if arguments[0] == "--version":
        import skyrl_train

        print(skyrl_train.__version__)
        raise SystemExit(0)
    if arguments[0] not in PROGRAMS:
        close = difflib.get_close_matches(arguments[0], PROGRAMS, n=1)
        hint = f"did you mean {close[0]}?" if close else "unknown command."
        print(f"error: skyrl-train {arguments[0]}: {hint}\n\n{usage()}", file=sys.stderr)
        raise SystemExit(2)
    module = f"skyrl_train.entrypoints.{PROGRAMS[arguments[0]][0]}"
    sys.argv = [module, *arguments[1:]]
    runpy.run_module(module, run_name="__main__")


def usage() -> str:
    lines = [
        f"  {name:<17}{purpose} (skyrl_train.entrypoints.{module})" for name, (module, purpose) in PROGRAMS.items()
    ]
    return "\n".join(["usage: skyrl-train COMMAND [+experiment=NAME] [key=value ...]", "", *lines])


if __name__ == "__main__":
    main()
