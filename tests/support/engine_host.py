"""A process that holds a vLLM engine for the proof of the weight sync, and the connection to it.

It is vLLM's own `LLM` with the worker in this process and our transfer in the worker: vLLM is imported once, an engine
starts in a second or two. One at a time, for the end of one takes down what all engines of a process share: so a host
holds either the engine that is synced, or a fresh one after another.

    python -m tests.support.engine_host SOCKET
"""

from __future__ import annotations

import multiprocessing.connection
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from skyrl_train.engines.settings import engine_arguments, set_environment
from skyrl_train.weight_sync.digest import compare
from tests.support.settings import MIB, changed, engine_settings

START_S = 120
Answers = list[tuple[list[int], list[list[tuple[int, float]]]]]
"""Per request its greedy tokens, and per position the logprob of every token of the vocabulary."""

# The first is longer than two blocks of the engine's cache, so that its prefix is kept.
PROMPTS = [[4 + (11 * n + 7 * k) % 50 for k in range(70 if n == 0 else 5 + n)] for n in range(4)]
MAX_LEN = 128


class Host:
    """The engine, and what is asked of it."""

    def __init__(self) -> None:
        self._settings = engine_settings("", "proof", "float32", MAX_LEN)
        self._llm: Any = None

    def start(self, model_path: str, dtype_name: str) -> None:
        """End the engine there was, and start one that loads the checkpoint. Args: dtype_name: fp8 is quantised."""
        from vllm import LLM

        from skyrl_train.engines.vllm.compat import attention_arguments

        self._llm = None
        settings = changed(
            self._settings,
            model_path=model_path,
            model_dtype="bfloat16" if dtype_name == "fp8" else dtype_name,
            quantization="fp8" if dtype_name == "fp8" else None,
            kv_cache_memory_gb=16 * MIB,
            max_num_seqs=16,
            engine_init_kwargs={"max_logprobs": -1, "skip_tokenizer_init": True},
        )
        arguments = engine_arguments(settings, "cpu")
        del arguments["enable_log_requests"]  # of AsyncLLM alone
        self._llm = LLM(**arguments | attention_arguments(arguments))

    def init(self, info: dict[str, Any]) -> None:
        self._llm.collective_rpc("init_weight_transfer_engine", args=({"info": info},))

    def begin(self) -> None:
        self._llm.collective_rpc("skyrl_close_update")
        self._llm.collective_rpc("start_weight_update")

    def update(self, message: dict[str, Any]) -> None:
        self._llm.collective_rpc("update_weights", args=({"message": message},))

    def finish(self, sent_digests: dict[str, int]) -> Answers:
        """Check and finish as `Engine.finish_weight_update` does, and answer."""
        (report,) = self._llm.collective_rpc("skyrl_sync_report")
        compare(sent_digests, report["digests"])
        assert not report["faults"], report["faults"]
        self._llm.collective_rpc("finish_weight_update")
        assert self._llm.reset_prefix_cache()
        return answers(self._llm)

    def answers(self) -> Answers:
        return answers(self._llm)


def answers(llm: Any) -> Answers:
    """Sampled tokens with all logprobs, then the same prompts scored (a scored request uses no cached prefix)."""
    from vllm import SamplingParams

    sampled = SamplingParams(temperature=0.0, max_tokens=12, logprobs=-1, detokenize=False, ignore_eos=True)
    scored = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=-1, detokenize=False)
    found: Answers = []
    for params in (sampled, scored):
        prompts = [{"prompt_token_ids": ids} for ids in PROMPTS]
        for output in llm.generate(prompts, params, use_tqdm=False):
            one = output.outputs[0]
            rows = one.logprobs if params is sampled else output.prompt_logprobs[1:]
            found.append(
                (list(one.token_ids), [sorted((token, entry.logprob) for token, entry in row.items()) for row in rows])
            )
    return found


class Client:
    """The way to a host; each process that talks to it opens its own."""

    def __init__(self, address: str) -> None:
        deadline = time.monotonic() + START_S
        while True:
            try:
                self._connection = multiprocessing.connection.Client(address)
                return
            except (FileNotFoundError, ConnectionRefusedError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)

    def call(self, method: str, *args: Any) -> Any:
        return self.post(method, *args).wait()

    def post(self, method: str, *args: Any) -> Posted:
        """Without waiting; answers come in the order of the calls."""
        self._connection.send((method, args))
        return Posted(method, self._connection)


class Posted:
    """A call that the host works on; a `control.Pending`."""

    def __init__(self, method: str, connection: Any) -> None:
        self._method, self._connection = method, connection
        self._answer: tuple[str | None, Any] | None = None

    def check(self) -> None:
        """Raises what the host raised, if it has answered by now."""
        if self._answer is None and self._connection.poll(0):
            self._answer = self._connection.recv()
        if self._answer is not None and self._answer[0] is not None:
            raise RuntimeError(f"{self._method}: {self._answer[0]}")

    def wait(self) -> Any:
        if self._answer is None:
            assert self._connection.poll(START_S), f"the engine host did not answer {self._method}"
        self.check()
        assert self._answer is not None
        return self._answer[1]


@contextmanager
def engine_host(folder: Path, name: str) -> Iterator[str]:
    """A running host; yields its address."""
    address = str(folder / f"{name}.socket")
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    with (folder / f"{name}.log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "tests.support.engine_host", address], env=environment, stdout=log, stderr=log
        )
    try:
        yield address
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10)


def serve(address: str) -> None:
    """Work off calls one by one, whatever sends them."""
    host = Host()
    listener = multiprocessing.connection.Listener(address, backlog=64)
    door = listener._listener._socket  # type: ignore[attr-defined]
    clients: list[Any] = []
    while True:
        callers: list[Any] = multiprocessing.connection.wait([door, *clients])
        for ready in callers:
            if ready is door:
                clients.append(listener.accept())
                continue
            try:
                method, args = ready.recv()
            except (EOFError, ConnectionResetError):
                clients.remove(ready)
                continue
            try:
                answer: tuple[str | None, Any] = (None, getattr(host, method)(*args))
            except Exception as error:
                import traceback

                traceback.print_exc()
                answer = (f"{type(error).__name__}: {error}", None)
            ready.send(answer)


if __name__ == "__main__":
    set_environment(engine_settings(__file__, "", "float32", MAX_LEN), "cpu")
    serve(sys.argv[1])
