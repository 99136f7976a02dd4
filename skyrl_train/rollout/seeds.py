"""Seeds of requests, with which samples depend on the weights alone and not on concurrent requests."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from skyrl_train.types import SamplingParams


def seed(*parts: int | str) -> int:
    """A seed from 0 to 2**63 - 1 that depends on the parts alone."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def seeded(sampling_params: SamplingParams, *parts: int | str) -> SamplingParams:
    """Derive a seed from that of the parameters and the parts; parameters without a seed stay unchanged."""
    if sampling_params.seed is None:
        return sampling_params
    return replace(sampling_params, seed=seed(sampling_params.seed, *parts))
