"""Generation by vLLM alone, without this project: what a step's generation is measured against.

    python -m benchmarks.lib.vllm_alone MODEL PROMPTS.jsonl --prompts 32 --prompt-tokens 128 --samples-per-prompt 8 \
        --new-tokens 2048

The engine has the settings that vLLM chooses, room for all samples at once, and 80 % of the GPU. Prints the tokens per
second of the better of two rounds as the last line; each round has prompts of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

from benchmarks.lib.main_job import environment

ROUNDS = 2
FOUND = "tokens/s: "
"""Begins the line of the result: vLLM prints others, also after it."""


def tokens_per_s(model: Path, prompts: Path, args: argparse.Namespace) -> dict[str, float]:
    """Of a process of its own. Raises: RuntimeError with the end of its output."""
    sizes = [f"--samples-per-prompt={args.samples_per_prompt}", f"--new-tokens={args.new_tokens}"]
    command = [sys.executable, "-m", "benchmarks.lib.vllm_alone", str(model), str(prompts), *sizes]
    command += [f"--prompts={args.prompts}", f"--prompt-tokens={args.prompt_tokens}"]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"vLLM ended with exit code {done.returncode}:\n{(done.stdout + done.stderr)[-3000:]}")
    last = [line.removeprefix(FOUND) for line in done.stdout.splitlines() if line.startswith(FOUND)][-1]
    return {"vllm_alone_tokens_per_s": float(last)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("data", type=Path)
    for name in ("samples-per-prompt", "new-tokens", "prompts", "prompt-tokens"):
        parser.add_argument(f"--{name}", type=int, required=True)
    args = parser.parse_args()
    from vllm import LLM, SamplingParams

    texts = [json.loads(line)["prompt"][0]["content"] for line in args.data.read_text().splitlines()]
    llm = LLM(
        str(args.model),
        max_num_seqs=args.prompts * args.samples_per_prompt,
        max_model_len=args.prompt_tokens + args.new_tokens,
        gpu_memory_utilization=0.8,
    )
    ask = SamplingParams(n=args.samples_per_prompt, max_tokens=args.new_tokens, temperature=1.0, ignore_eos=True)
    best = 0.0
    for first in range(0, ROUNDS * args.prompts, args.prompts):
        started = time.perf_counter()
        done = llm.generate(texts[first : first + args.prompts], ask, use_tqdm=False)
        tokens = sum(len(sample.token_ids) for request in done for sample in request.outputs)
        best = max(best, tokens / (time.perf_counter() - started))
    print(f"\n{FOUND}{best}", flush=True)


if __name__ == "__main__":
    main()
