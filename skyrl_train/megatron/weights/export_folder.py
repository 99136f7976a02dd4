"""The folder of an export: it gets its name when everything in it is complete and verified."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import torch.distributed as dist

from skyrl_train.file_sum import FileSum, size_problems, sum_of
from skyrl_train.hf.checkpoint import INDEX
from skyrl_train.megatron.weights.export import write_together

SUMS = "SHA256SUMS"
"""Digests of all other files, for `sha256sum -c SHA256SUMS`."""


def unfinished_folder(folder: str) -> Path:
    """Beside the folder, or in it where it is there already: a mount, or one whose parent cannot be written."""
    target = Path(folder)
    return target / ".unfinished" if target.exists() else target.with_name(f".{target.name}.unfinished")


@contextlib.contextmanager
def export_folder(folder: str) -> Iterator[tuple[str, dict[str, FileSum]]]:
    """An empty folder to write an export into, and the sums to fill, of the files that another rank wrote.

    It becomes `folder` at the end, with a list of all digests. If that fails, or what is written into it raises, rank 0
    removes it, and what was in `folder` stays. A collective over all ranks, which must all see the folder.
    Raises: ValueError on every rank if one cannot write.
    """
    unfinished, is_first = unfinished_folder(folder), dist.get_rank() == 0
    sums: dict[str, FileSum] = {}
    write_together(unfinished, lambda: _remove(unfinished) if is_first else None)
    try:
        yield str(unfinished), sums
        write_together(folder, lambda: publish(unfinished, Path(folder), sums) if is_first else None)
    except ValueError:
        if is_first:
            shutil.rmtree(unfinished, ignore_errors=True)
        raise


def publish(unfinished: Path, target: Path, sums: Mapping[str, FileSum]) -> None:
    """Make `unfinished` the folder `target`, with the digests of all files.

    In a folder that is there already, files are replaced one by one; its index is gone until the last one is
    there, so that nobody loads old and new weights together.
    Args: sums: of files whose digests are known; others are read.
    Raises: OSError, also if a file is not there: another node wrote it where this one does not see it.
    """
    if problems := size_problems(unfinished, sums):
        raise OSError(f"{'; '.join(problems)}. The folder of an export must be one folder for all nodes")
    files = sorted(str(path.relative_to(unfinished)) for path in unfinished.rglob("*") if path.is_file())
    digests = {name: (sums.get(name) or sum_of(unfinished / name, durable=True)).sha256 for name in files}
    (unfinished / SUMS).write_text("".join(f"{digest}  {name}\n" for name, digest in digests.items()))
    if not unfinished.is_relative_to(target):
        unfinished.replace(target)
        return
    (target / INDEX).unlink(missing_ok=True)
    for name in sorted((*files, SUMS), key=lambda name: name == INDEX):
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        (unfinished / name).replace(target / name)
    _remove(unfinished)


def _remove(folder: Path) -> None:
    if folder.exists():
        shutil.rmtree(folder)
