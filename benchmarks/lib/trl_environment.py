"""A virtual environment with TRL, apart from the project's: the two ask for different versions of common packages."""

from __future__ import annotations

import subprocess
import sys
import venv
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
DEFAULT_FOLDER = Path.home() / ".cache" / "skyrl_train_bench" / "trl"


def trl_python(folder: Path) -> Path:
    """The interpreter of the environment in `folder`, which is made if it is missing or asks for other packages.

    TRL is the newest that the index has when the environment is made, beside the torch version of this process.
    Packages come from where pip's configuration says, by uv, as in scripts/setup_env.sh.
    """
    # The release alone: which build of it (CPU, CUDA) is the index's choice, as it is for the project.
    packages = [f"torch=={_torch_release()}", "trl", "datasets"]
    python, stamp = folder / "bin" / "python", folder / "installed"
    if stamp.is_file() and stamp.read_text().split() == packages:
        return python
    print(f"installing {' '.join(packages)} into {folder}, about a minute", flush=True)
    venv.create(folder, with_pip=True)
    _run([str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "uv>=0.9"])
    settings = f'eval "$({python} -m pip config list | {python} {SCRIPTS / "pip_to_uv.py"})"'
    install = f"{folder / 'bin' / 'uv'} pip install --quiet --python {python} --compile-bytecode"
    left_out = f"--overrides {SCRIPTS / 'left_out.txt'}"
    _run(["bash", "-c", f"set -euo pipefail; {settings}; {install} {left_out} {' '.join(packages)}"])
    stamp.write_text(" ".join(packages))
    return python


def _torch_release() -> str:
    import torch

    return torch.__version__.partition("+")[0]


def _run(command: list[str]) -> None:
    if subprocess.run(command).returncode != 0:
        sys.exit(f"could not make the environment for TRL; failed: {' '.join(command)}")
