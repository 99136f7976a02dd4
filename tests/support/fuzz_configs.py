"""Random configurations: what the ledger accepts is what Hugging Face computes, or cannot be built at all.

    python -m tests.support.fuzz_configs --cases 10000 --seed 0

Prints each case that is accepted and differs, and a count by outcome. Exit code 1 if there was one.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import transformers

from skyrl_train.checks.equivalence import config_and_problems
from skyrl_train.megatron.verify.model_check import check_model
from tests.support.families import FAMILIES, SHAPE

NUMBERS = (0, 1, 2, 3, 4, 5, 6, 8, 16, 24, 64, -1)
FACTORS = (0.0, 0.25, 0.5, 0.75, 1.0, 1.5, 2.0, 4.0, 40.0)
ANY = (None, True, False, 0, 1, 2, -1, 0.5, "none", [], [0], {})
ROPE_VALUES: dict[str, tuple[Any, ...]] = {
    "rope_type": ("default", "linear", "dynamic", "yarn", "longrope", "llama3", "mrope"),
    "rope_theta": (1.0, 100.0, 10000.0, 1e6, 10000),
    "factor": FACTORS,
    "partial_rotary_factor": FACTORS,
    "original_max_position_embeddings": (8, 32, 512, 4096),
    "attention_factor": (None, 0.5, 1.0, 1.3),
    "beta_fast": (None, 8, 32, 64.0),
    "beta_slow": (None, 1, 2, 4.0),
    "mscale": FACTORS,
    "mscale_all_dim": FACTORS,
    "truncate": (True, False, None),
    "low_freq_factor": FACTORS,
    "high_freq_factor": FACTORS,
    "short_factor": ([1.0] * 8,),
    "long_factor": ([2.0] * 8,),
    "unheard_of": ANY,
}
VALUES: dict[str, tuple[Any, ...]] = {
    "vocab_size": (1, 7, 131, 500),
    "hidden_size": (16, 60, 64, 72, 100),
    "intermediate_size": (1, 30, 48, 97),
    "num_hidden_layers": (1, 2, 3, 5),
    "num_attention_heads": (1, 2, 3, 4, 6, 8),
    "num_key_value_heads": (None, 1, 2, 3, 4, 8),
    "head_dim": (None, 2, 6, 8, 16, 20),
    "hidden_act": ("silu", "swish", "gelu", "relu"),
    "rms_norm_eps": (0.0, 1e-12, 1e-6, 1e-5, 0.1),
    "tie_word_embeddings": (True, False),
    "pad_token_id": (None, -1, 0, 3, 130, 131, 600),
    "attention_bias": (True, False),
    "mlp_bias": (True, False),
    "attention_dropout": (0.0, 0.1),
    "sliding_window": (None, 0, 4, 64),
    "use_sliding_window": (True, False),
    "max_window_layers": (0, 1, 2, 28),
    "layer_types": (None, ["full_attention"] * 4, ["sliding_attention"] * 4),
    "num_experts": NUMBERS,
    "num_local_experts": NUMBERS,
    "n_routed_experts": NUMBERS,
    "n_shared_experts": (None, 0, 1, 2, 3),
    "num_experts_per_tok": NUMBERS,
    "moe_intermediate_size": (1, 24, 48),
    "shared_expert_intermediate_size": (0, 24, 48),
    "norm_topk_prob": (True, False),
    "decoder_sparse_step": (1, 2),
    "mlp_only_layers": (None, [], [0], [1]),
    "qkv_bias": (True, False),
    "use_qk_norm": (True, False),
    "n_group": (None, 1, 2, 4),
    "topk_group": (None, 1, 2, 4),
    "first_k_dense_replace": (0, 1, 2, 4, 9),
    "mlp_layer_types": (["dense"] * 4, ["sparse"] * 4, ["dense", "dense", "sparse", "sparse"], ["sparse", "dense"] * 2),
    "routed_scaling_factor": FACTORS,
    "q_lora_rank": (None, 8, 24),
    "kv_lora_rank": (4, 16),
    "qk_nope_head_dim": (0, 8, 16),
    "qk_rope_head_dim": (0, 4, 7, 8, 16),
    "v_head_dim": (8, 16, 24),
    "rope_interleave": (True, False),
    "router_jitter_noise": (0.0, 0.1),
    "router_aux_loss_coef": (0.0, 0.1),
    "output_router_logits": (True, False),
    "pretraining_tp": (1, 2),
    "num_nextn_predict_layers": (0, 1),
    "max_position_embeddings": (16, 64, 512, 100000),
    "rope_theta": (100.0, 1e6),
    "rope_scaling": (None, {"type": "linear", "factor": 2.0}, {"rope_type": "dynamic", "factor": 2.0}),
    "scoring_func": ("sigmoid", "softmax"),
    "topk_method": ("noaux_tc", "greedy"),
    "initializer_range": (0.0, 1.0),
    "use_cache": (True, False),
    "is_decoder": (True, False),
    "chunk_size_feed_forward": (0, 2),
    "unheard_of": ANY,
    "logits_soft_cap": (30.0,),
}


def random_config(rng: random.Random) -> dict[str, Any]:
    """A config.json of a random family with one to five random changes, half of them to its rotary embedding."""
    kind, own = FAMILIES[rng.choice(sorted(FAMILIES))]
    values = getattr(transformers, f"{kind}Config")(**{**SHAPE, "num_hidden_layers": 4, **own}).to_dict()
    for _ in range(rng.randint(1, 3)):
        name = rng.choice([*sorted(values.keys() & VALUES.keys()) * 4, *sorted(VALUES)])
        values[name] = rng.choice(VALUES[name])
    if rng.random() < 0.4:
        rope = dict(values.get("rope_parameters") or {})
        for _ in range(rng.randint(1, 3)):
            name = rng.choice(sorted(ROPE_VALUES))
            rope[name] = rng.choice(ROPE_VALUES[name])
        values["rope_parameters"] = rope
    if rng.random() < 0.5 and values.get("layer_types") and len(values["layer_types"]) != values["num_hidden_layers"]:
        values.pop("layer_types")
    return values


def outcome(values: dict[str, Any]) -> tuple[str, str]:
    """(unreadable, refused, not built, equal or DIFFERENT, details)."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(values))
        try:
            config, problems = config_and_problems(folder, "model")
        except ValueError as error:
            return "unreadable", str(error)
        if problems:
            return "refused", "; ".join(problems)
        try:
            verdict = check_model(config)
        except Exception as error:  # every way in which either side cannot be built refuses the model
            return "not built", str(error).strip().splitlines()[-1]
    return ("DIFFERENT", "; ".join(verdict.problems)) if verdict.problems else ("equal", f"{verdict.gradient:.1e}")


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--cases", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this time")
    options = parser.parse_args()
    torch.set_num_threads(1)
    logging.disable()
    warnings.simplefilter("ignore")
    transformers.utils.logging.disable_progress_bar()
    counts: Counter[str] = Counter()
    reasons: Counter[str] = Counter()
    started = time.monotonic()
    for seed in range(options.seed, options.seed + options.cases):
        if time.monotonic() - started > options.seconds:
            break
        values = random_config(random.Random(seed))
        with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere), contextlib.redirect_stderr(nowhere):
            found, details = outcome(values)
        counts[found] += 1
        if found == "not built":
            reasons[details[:100]] += 1
        if found == "DIFFERENT":
            print(f"seed {seed}: {details}\n  {json.dumps(values)}", flush=True)
    print(f"seeds {options.seed} on: {counts.total()} cases in {time.monotonic() - started:.0f} s: {dict(counts)}")
    for reason, count in reasons.most_common(25):
        print(f"  not built, {count}: {reason}")
    return 1 if counts["DIFFERENT"] else 0


if __name__ == "__main__":
    sys.exit(main())
