"""How weights travel, for both ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """The names are those of `generator.*`."""

    weight_sync_backend: str
    """What was chosen for "auto"."""
    weight_sync_bucket_mb: int
    weight_sync_timeout_s: float
    """Deadline of each wait of one end for the other."""
    model_dtype: str
    """dtype in which the tensors travel."""
