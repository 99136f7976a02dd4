"""Check before anything starts that a model is computed here as Hugging Face computes it.

Two nets: the ledger refuses fields of config.json that are not built, by name and value; then the configuration, made
small, runs through Hugging Face and through Megatron in a process of its own, whose result is cached. Neither reads the
model's weights.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from skyrl_train.hf.ledger import LEDGERS, config_problems
from skyrl_train.hf.shrink import shrunk
from skyrl_train.spelling import nearest

log = logging.getLogger(__name__)

PROGRAM = """
import sys
from skyrl_train.imports import quick_imports
with quick_imports(without=("wandb",)):  # Megatron would import it
    from skyrl_train.megatron.verify.model_check import main
sys.exit(main(sys.argv[1:]))
"""
SOURCES = ("algorithms", "batching", "hf", "megatron")
"""Folders of this package whose code the result depends on."""
PACKAGES = ("torch", "transformers", "megatron-core", "mbridge")
TIMEOUT_S = 600.0


def checked_config(folder: str, key: str) -> PretrainedConfig:
    """The configuration of the model in `folder`, if it is computed here as Hugging Face computes it.

    Args: key: name of the setting that gave the folder, for messages.
    Raises: ValueError with everything that is not.
    """
    config = known_config(folder, key)
    compare_with_hugging_face(config, folder, key)
    return config


def known_config(folder: str, key: str) -> PretrainedConfig:
    """The configuration of the model in `folder`, if every field of it is known and built.

    Raises: ValueError with everything that is not.
    """
    config, problems = config_and_problems(folder, key)
    _require_none(problems, config, folder, key)
    return config


def compare_with_hugging_face(config: PretrainedConfig, folder: str, key: str) -> None:
    """Run the configuration, made small, through Hugging Face and through Megatron.

    Takes about 15 s the first time that a small configuration is seen on this machine, later a few milliseconds.

    Raises: ValueError if the two differ, or one of them cannot be built.
    """
    _require_none(_compare(config, folder), config, folder, key)


def _require_none(problems: list[str], config: PretrainedConfig, folder: str, key: str) -> None:
    if problems:
        raise ValueError(
            f"{key} is {folder}: this {config.model_type} model would not be computed as Hugging Face computes it: "
            + "; ".join(problems)
        )


def config_and_problems(folder: str, key: str) -> tuple[PretrainedConfig, list[str]]:
    """The configuration of the model in `folder`, and what the ledger has against it.

    Raises: ValueError for a file that cannot be read and for a family that cannot be trained.
    """
    given = _given(folder, key)
    config = _read(folder, key, given)
    return config, config_problems(config, given)


def _given(folder: str, key: str) -> dict[str, Any]:
    file = Path(folder, "config.json")
    try:
        given = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{key} is {folder}: its config.json cannot be read ({error})") from None
    if not isinstance(given, dict):
        raise ValueError(f"{key} is {folder}: its config.json is not an object")
    return given


def _read(folder: str, key: str, given: Mapping[str, Any]) -> PretrainedConfig:
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in LEDGERS:
        near = nearest(str(kind), LEDGERS)
        raise ValueError(
            f"{key} is {folder}: model_type is {kind!r}, and the families that can be trained are "
            f"{', '.join(sorted(LEDGERS))}" + (f" (nearest: {near})" if near else "")
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers validates each field with errors of its own
        raise ValueError(f"{key} is {folder}: transformers does not accept its config.json: {error}") from error
    if config.model_type != kind:  # it reads a Mistral with windows in some layers as another family
        raise ValueError(f"{key} is {folder}: transformers reads it as {config.model_type!r}, which is not built")
    return config


def _compare(config: PretrainedConfig, folder: str) -> list[str]:
    """What the comparison of the small model found; nothing where an earlier one found nothing."""
    cached = _cache_file(config)
    if _is_noted(cached):
        return []
    log.info("comparing the model's configuration, made small, with Hugging Face (once, about 15 s)")
    started = time.monotonic()
    # The package may have been found by this process's own path.
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(paths),
    }
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, folder],
            capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [f"comparing it with Hugging Face took more than {TIMEOUT_S:.0f} s"]
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        return [f"it cannot be built: {lines[-1] if lines else f'exit code {done.returncode}'}"]
    verdict = json.loads(done.stdout.splitlines()[-1])
    if verdict["problems"]:
        return [f"with random weights {problem}" for problem in verdict["problems"]]
    _remember(cached, verdict | {"seconds": round(time.monotonic() - started, 1)})
    return []


def _cache_file(config: PretrainedConfig) -> Path:
    """Where a passed comparison of this configuration, by this code and these libraries, is noted."""
    digest = hashlib.sha256(json.dumps(shrunk(config).to_dict(), sort_keys=True, default=str).encode())
    digest.update(repr([(name, importlib.metadata.version(name)) for name in PACKAGES]).encode())
    root = Path(__file__).parents[1]
    for source in sorted(file for name in SOURCES for file in (root / name).rglob("*.py")):
        digest.update(source.read_bytes())
    return _cache_folder() / "skyrl_train" / "model_checks" / f"{digest.hexdigest()[:32]}.json"


def _cache_folder() -> Path:
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # neither HOME nor an entry in passwd, as in some containers
        return Path(tempfile.gettempdir()) / f"skyrl_train_{os.getuid()}"


def _is_noted(file: Path) -> bool:
    try:
        return file.is_file()
    except OSError:  # a HOME of another user
        return False


def _remember(file: Path, verdict: Mapping[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(verdict))
        partial.replace(file)
    except OSError as error:
        log.warning("cannot cache the comparison with Hugging Face in %s (%s); it is repeated next time", file, error)
