"""Functions of the algorithms by their names in the configuration. Importing this module does not import torch.

An entry is a function, or `module:attribute`, imported on first use. Users name their functions `module:attribute`, or
register a name in a module of `trainer.custom_modules`: `LOSSES.register("mine", mine)`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

from skyrl_train.imports import imported, own_module, reason_of, require_unedited
from skyrl_train.spelling import nearest

Function = Callable[..., Any]
HERE = "skyrl_train.algorithms"


class Table(Mapping[str, Function]):
    """Functions by name, for one key of the configuration."""

    def __init__(self, key: str, entries: Mapping[str, str]) -> None:
        """Args: key: key of the configuration; entries: name -> `module:attribute` below this package."""
        self.key = key
        self._entries: dict[str, str | Function] = {name: f"{HERE}.{place}" for name, place in entries.items()}

    def __getitem__(self, name: str) -> Function:
        entry = self._entries[name]
        return resolve_name(entry) if isinstance(entry, str) else entry

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)

    __hash__ = object.__hash__  # rules of configuration keys are hashed

    def __eq__(self, other: object) -> bool:
        return self is other

    def register(self, name: str, function: Function, *, replaces: bool = False) -> None:
        """Add a user's function. Args: replaces: whether a function of this name may be replaced.
        Raises: ValueError if the name is taken.
        """
        if not replaces and self._entries.get(name, function) is not function:
            raise ValueError(f"{self.key}: the name {name} is taken. Register the function under another name")
        self._entries[name] = function

    def place(self, name: str) -> str | None:
        """The module of a registered function; None for any other name."""
        entry = self._entries.get(name)
        return None if entry is None or isinstance(entry, str) else entry.__module__

    def resolve(self, name: str) -> Function:
        """The function called `name` or at `module:attribute`.

        Raises: ValueError with the key and the valid names, or why the import failed.
        """
        if name in self._entries:
            return self[name]
        if ":" in name:
            function: Function = imported(self.key, name)
            if not callable(function):
                raise ValueError(f"{self.key} is {name}: it is a {type(function).__name__}. Name a function")
            return function
        raise ValueError(f"{self.key} is {name}: {self.problem(name)}")

    def problem(self, name: str) -> str | None:
        """End of a sentence that begins with key and name; None for a valid name."""
        if name in self._entries or ":" in name:
            return None
        close = nearest(name, self)
        return (f"did you mean {close}? " if close else "") + f"It must be {self}"

    def __str__(self) -> str:
        return f"one of {', '.join(self)}, or your own module:attribute"


def compares_samples(estimator: str) -> bool:
    """Whether the advantages of this estimator are 0 in a group of one sample."""
    return getattr(ADVANTAGES.resolve(estimator), "compares_samples", False)


def needs_whole_samples(loss: str) -> bool:
    """Whether this loss cannot be computed on ranks that have parts of samples."""
    return getattr(LOSSES.resolve(loss), "needs_whole_samples", False)


def reads_values(estimator: str) -> bool:
    """Whether this estimator needs a critic; False for a name that cannot be resolved, which a check reports."""
    try:
        function = ADVANTAGES.resolve(estimator)
    except ValueError:
        return False
    return "values" in getattr(function, "needs", ())


def compares_with_greedy(estimator: str) -> bool:
    """Whether this estimator compares rewards with that of a greedy response to the prompt."""
    return getattr(ADVANTAGES.resolve(estimator), "compares_with_greedy", False)


def reads_max_seq_len(loss: str, estimator: str) -> bool:
    """Whether the user registered one of them, with a parameter for the longest conversation in tokens."""
    found = [table[name] for table, name in ((LOSSES, loss), (ADVANTAGES, estimator)) if table.place(name) is not None]
    return any(getattr(function, "reads_max_seq_len", False) for function in found)


def import_modules(names: Iterable[str]) -> None:
    """Import `trainer.custom_modules`. Raises: ValueError naming the module and the reason, or one that was edited."""
    for name in names:
        try:
            own_module(name)
        except (Exception, SystemExit) as error:  # a user's module may raise anything
            raise ValueError(
                f"trainer.custom_modules names {name}, which cannot be imported ({reason_of(error)}). Its "
                "folder must be in PYTHONPATH, or be the one that the program is started in"
            ) from error
        require_unedited(name)


LOSSES = Table(
    "trainer.algorithm.policy_loss_type",
    {
        "regular": "losses.ppo:regular",
        "dual_clip": "losses.ppo:dual_clip",
        "cispo": "losses.cispo:cispo",
        "gspo": "losses.gspo:gspo",
        "gmpo": "losses.gmpo:gmpo",
        "sapo": "losses.sapo:sapo",
        "dppo": "losses.dppo:dppo",
        "vespo": "losses.vespo:vespo",
        "topr": "losses.topr:topr",
        "clip_cov": "losses.covariance:clip_cov",
        "kl_cov": "losses.covariance:kl_cov",
        "reinforce": "losses.policy_gradient:reinforce",
        "importance_sampling": "losses.policy_gradient:importance_sampling",
        "rollout_is": "losses.policy_gradient:rollout_is",
        "cross_entropy": "losses.cross_entropy:cross_entropy",
    },
)
"""f(TokenInputs, *, parameters) -> LossTerms"""

ADVANTAGES = Table(
    "trainer.algorithm.advantage_estimator",
    {
        "grpo": "advantages.groups:grpo",
        "rloo": "advantages.groups:rloo",
        "maxrl": "advantages.groups:maxrl",
        "opo": "advantages.groups:opo",
        "gpg": "advantages.groups:gpg",
        "pass@k": "advantages.groups:pass_at_k",
        "zero": "advantages.groups:zero",
        "gdpo": "advantages.gdpo:gdpo",
        "remax": "advantages.reinforce:remax",
        "reinforce++": "advantages.reinforce:reinforce_plus_plus",
        "reinforce++_baseline": "advantages.reinforce:reinforce_plus_plus_baseline",
        "gae": "advantages.gae:gae",
    },
)
"""f(CreditInputs, *, parameters) -> advantages [T] float32, or AdvantagesAndReturns; or lifted by `per_sample`
(credit.py)"""

CORRECTIONS = Table(
    "trainer.algorithm.corrections",
    {
        name: f"corrections:{name}"
        for name in (
            *("token_tis", "sequence_tis", "icepop"),
            *("token_mask", "geometric_mask", "product_mask", "outlier_mask", "opsm"),
            "top_entropy",
        )
    },
)
"""f(TokenInputs, *, parameters) -> Correction"""

KL_ESTIMATORS = Table(
    "trainer.algorithm.kl_estimator_type",
    {
        **{name: f"kl:{name}" for name in ("k1", "k2", "k3")},
        "abs": "kl:absolute",
        **{"k1+": "kl:k1_plus", "k3+": "kl:k3_plus", "abs+": "kl:absolute_plus"},
    },
)
"""f(logprobs [P], ref_logprobs [P]) -> [P]"""

REDUCTIONS = Table(
    "trainer.algorithm.loss_reduction",
    {
        name: f"reductions:{name}"
        for name in ("token_mean", "sequence_mean", "seq_mean_token_sum_norm", "dr_grpo", "prompt_mean")
    },
)
"""f(num_tokens [B] int64, trained tokens of each sample of one mini-batch; group_ids [B]; MaxLengths) -> [B]
int64, the divisor of each sample's tokens, at least 1 (any value where it has none)"""
