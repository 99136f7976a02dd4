"""Check before anything starts that a model is computed as Hugging Face computes it.

The ledger refuses fields of config.json that are not built, by name and value. Then a small version of the
configuration runs through Hugging Face and Megatron in a separate process, whose result is cached. Neither check reads
the model's weights.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.metadata
import json
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from transformers import AutoConfig, PretrainedConfig

from skyrl_train.hf.download import python_path
from skyrl_train.hf.ledger import LEDGERS, config_problems
from skyrl_train.hf.shrink import shrunk
from skyrl_train.spelling import nearest

log = logging.getLogger(__name__)

PROGRAM = """
import sys
sys.modules["transformer_engine"] = sys.modules["apex"] = None  # Megatron would call them, which need a GPU
from skyrl_train.imports import megatron_imports
with megatron_imports():
    from skyrl_train.megatron.verify.model_check import main
sys.exit(main(sys.argv[1:]))
"""
SOURCES = ("algorithms", "batching", "hf", "megatron")
"""Folders of this package on whose code the result depends."""
PACKAGES = ("torch", "transformers", "megatron-core", "mbridge")
TIMEOUT_S = 600.0


def known_config(folder: str, key: str) -> PretrainedConfig:
    """The configuration of the model in `folder`.

    Args: key: of the configuration, for errors. Raises: ValueError with every field that is unknown or not built.
    """
    config, problems = config_and_problems(folder, key)
    _require_none(problems, config, folder, key)
    return config


def compare_with_hugging_face(config: PretrainedConfig, folder: str, key: str) -> None:
    """Run a small version of the configuration through Hugging Face and Megatron.

    Takes 6 to 10 s the first time on a machine (docs/readings/models.md), later a few milliseconds.
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
    """The configuration of the model in `folder`, and the problems that the ledger finds.

    Raises: ValueError for an unreadable file or a family that cannot be trained.
    """
    try:
        given = json.loads(Path(folder, "config.json").read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{key} is {folder}: its config.json cannot be read ({error})") from None
    if not isinstance(given, dict):
        raise ValueError(f"{key} is {folder}: its config.json is not an object")
    kind = given.get("model_type")
    if not isinstance(kind, str) or kind not in LEDGERS:
        near = nearest(str(kind), LEDGERS)
        raise ValueError(
            f"{key} is {folder}: model_type is {kind!r}. The families that can be trained are "
            f"{', '.join(sorted(LEDGERS))}" + (f" (nearest: {near})" if near else "")
        )
    try:
        config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
    except Exception as error:  # transformers validates each field with its own errors
        raise ValueError(f"{key} is {folder}: transformers does not accept its config.json: {error}") from error
    if config.model_type != kind:  # a Mistral with windows in some layers becomes another family
        raise ValueError(f"{key} is {folder}: transformers reads it as {config.model_type!r}, which is not built")
    return config, config_problems(config, given)


def _compare(config: PretrainedConfig, folder: str) -> list[str]:
    """Differences of the small model; none if an earlier comparison found none."""
    cached = _cache_file(config)
    with contextlib.suppress(OSError):  # the HOME of another user
        if cached.is_file():
            return []
    log.info("comparing a small version of the model with Hugging Face (once, about 15 s)")
    started = time.monotonic()
    environment = os.environ | {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    try:
        done = subprocess.run(
            [sys.executable, "-c", PROGRAM, folder],
            capture_output=True, text=True, env=environment, timeout=TIMEOUT_S, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return [f"comparing it with Hugging Face took more than {TIMEOUT_S:.0f} s"]
    if done.returncode != 0:
        lines = [line for line in done.stderr.splitlines() if line.strip()]
        # An error's text may have more lines after the first.
        errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
        cause = (errors or lines or [f"exit code {done.returncode}"])[-1]
        return [f"it cannot be built: {cause}"]
    verdict = json.loads(done.stdout.splitlines()[-1])
    if verdict["problems"]:
        return [f"with random weights {problem}" for problem in verdict["problems"]]
    _remember(cached, verdict | {"seconds": round(time.monotonic() - started, 1)})
    return []


def _cache_file(config: PretrainedConfig) -> Path:
    """File that records a passed comparison of this configuration, with this code and these libraries."""
    digest = hashlib.sha256(json.dumps(shrunk(config).to_dict(), sort_keys=True, default=str).encode())
    digest.update(repr([(name, importlib.metadata.version(name)) for name in PACKAGES]).encode())
    root = Path(__file__).parents[1]
    for source in sorted(
        file for name in SOURCES for kind in ("py", "yaml") for file in (root / name).rglob(f"*.{kind}")
    ):
        digest.update(source.read_bytes())
    return _cache_folder() / "skyrl_train" / "model_checks" / f"{digest.hexdigest()[:32]}.json"


def _cache_folder() -> Path:
    if given := os.environ.get("XDG_CACHE_HOME"):
        return Path(given)
    try:
        return Path.home() / ".cache"
    except RuntimeError:  # some containers have neither HOME nor an entry in passwd
        return Path(tempfile.gettempdir()) / f"skyrl_train_{os.getuid()}"


def _remember(file: Path, verdict: Mapping[str, Any]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        partial = file.with_suffix(f".{os.getpid()}")
        partial.write_text(json.dumps(verdict))
        partial.replace(file)
    except OSError as error:
        log.warning("cannot cache the comparison with Hugging Face in %s (%s): it will be repeated", file, error)
