"""Settings of the weight sync, for both ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class SyncSettings:
    """Keys of `generator`, after the choice of a transport."""

    weight_sync_backend: str
    """Never "auto"."""
    weight_sync_bucket_mb: int
    weight_sync_timeout_s: float
    """Timeout in seconds of each wait of one end for the other."""
    model_dtype: str
    """dtype in which the tensors travel."""
