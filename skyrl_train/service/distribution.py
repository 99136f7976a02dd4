"""Check of the sampling parameters of submitted samples: only the trained distribution is accepted."""

from __future__ import annotations

from collections.abc import Mapping

NEUTRAL = {
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
}
"""Values that leave the model's distribution unchanged."""


def check_sampling(given: object, temperature: float) -> None:
    """Args: given: `sampling_params` of an engine's answer, or None; temperature: the trained one.

    Raises: ValueError for the first parameter that changes the distribution.
    """
    if given is None:
        return
    if not isinstance(given, Mapping):
        raise ValueError(f"sampling_params must be a dict, as in the engine's answer, got {given!r:.60}")
    for name, value in given.items():
        if name == "temperature":
            if value != temperature:
                raise ValueError(
                    f"sampling_params.temperature is {value!r}: the service trains at {temperature:g} "
                    "(generator.sampling_params.temperature). Sample at this temperature"
                )
        elif value and value != NEUTRAL.get(name):  # 0, false and null disable a parameter
            neutral = f"Set it to {NEUTRAL[name]:g}" if name in NEUTRAL else "Remove it from the request"
            raise ValueError(
                f"sampling_params.{name} is {value!r}: the sample is not from the distribution that is trained, over "
                f"all tokens. {neutral}"
            )
