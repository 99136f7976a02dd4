"""Facts that a vLLM server reports, and whether a run can use it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from skyrl_train.engines.remote.client import ServerClient, ServerError
from skyrl_train.engines.settings import EXTENSION, EngineSettings
from skyrl_train.weight_sync.channels.table import STOCK, transport

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

OLDEST = (0, 26)
PROBE_S = 30.0
PROBE_TEXT = "The answer to 12 + 34 is 46; naïve café, 北京.\n\tx = [1, 2]\n"
ROUTES_SINCE = {"/update_weight_version": (0, 27), "/shutdown_weight_transfer_engine": (0, 32)}


class ServerUnsuitableError(ValueError):
    """The server runs with unsuitable settings; the message says how to start it."""


@dataclass(frozen=True, slots=True)
class ServerFacts:
    version: str
    routes: frozenset[str]
    """Those of ROUTES_SINCE that it has."""
    model: str
    """Name under which it serves its model."""
    max_model_len: int
    dtype: str
    """"float32", "bfloat16", ..."""
    logprobs_mode: str
    max_new_tokens: int | None
    """Limit of every response, if its --override-generation-config sets one."""
    backend: str | None
    """Backend in its --weight-transfer-config, if it has one."""
    has_extension: bool
    """Whether it was started with this project's --worker-extension-cls."""
    num_workers: int
    """Ranks that receive weights: tensor times pipeline parallel size."""
    data_parallel_size: int

    @property
    def number(self) -> tuple[int, int]:
        return _number(self.version)


async def probe(client: ServerClient, timeout_s: float) -> ServerFacts:
    """Raises: ServerUnreachableError; ServerUnsuitableError if the server is dead, too old, has another API key or no
    development mode.
    """
    timeout_s = min(PROBE_S, timeout_s)
    try:
        await client.get("/health", timeout_s)
        version = str((await client.get("/version", timeout_s))["version"])
    except ServerError as error:
        hint = "its engine has died" if error.status == 503 else "is it a vLLM server?"
        raise ServerUnsuitableError(f"the server {client.url} is not healthy ({error}); {hint}") from error
    if _number(version) < OLDEST:
        raise ServerUnsuitableError(
            f"the server {client.url} runs vLLM {version}, whose weight updates have other calls. Use vLLM 0.26 or "
            "newer"
        )
    try:
        models = (await client.get("/v1/models", timeout_s))["data"]
        info = (await client.get("/server_info", timeout_s, config_format="json"))["vllm_config"]
    except ServerError as error:
        raise ServerUnsuitableError(_hint(client.url, error)) from error
    model, parallel = info["model_config"], info["parallel_config"]
    base = next((entry for entry in models if entry.get("parent") is None), {"id": model["model"]})
    return ServerFacts(
        version=version,
        routes=await _routes(client, version, timeout_s),
        model=base["id"],
        max_model_len=model["max_model_len"],
        dtype=str(model["dtype"]).removeprefix("torch."),
        logprobs_mode=str(model["logprobs_mode"]),
        max_new_tokens=(model.get("override_generation_config") or {}).get("max_new_tokens"),
        backend=(info.get("weight_transfer_config") or {}).get("backend"),
        has_extension=parallel.get("worker_extension_cls") == EXTENSION,
        num_workers=parallel["tensor_parallel_size"] * parallel["pipeline_parallel_size"],
        data_parallel_size=parallel["data_parallel_size"],
    )


def _hint(url: str, error: ServerError) -> str:
    if error.status == 401:
        return (
            f"the server {url} rejects the API key: generator.remote_api_key_env must name an environment variable "
            "with the value of the server's --api-key"
        )
    if error.status == 404:
        return (
            f"the server {url} has no {'/server_info' if '/server_info' in str(error) else 'model list'} ({error}): "
            "start it with the environment variable VLLM_SERVER_DEV_MODE=1, which enables the calls of a weight update"
        )
    return f"the server {url} does not report what it serves: {error}"


async def _routes(client: ServerClient, version: str, timeout_s: float) -> frozenset[str]:
    """From the server's openapi.json; if it is hidden (--disable-fastapi-docs), the version decides."""
    try:
        listed = (await client.get("/openapi.json", timeout_s))["paths"]
    except ServerError:
        return frozenset(route for route, since in ROUTES_SINCE.items() if _number(version) >= since)
    return frozenset(route for route in ROUTES_SINCE if route in listed)


def _number(version: str) -> tuple[int, int]:
    """(major, minor); a build without a number ("dev") counts as newer than all."""
    found = re.match(r"(\d+)\.(\d+)", version)
    return (int(found[1]), int(found[2])) if found else (999, 0)


def check_server(facts: ServerFacts, settings: EngineSettings) -> None:
    """Raises: ServerUnsuitableError with all problems."""
    problems = []
    if facts.max_model_len < settings.max_model_len:
        problems.append(
            f"its --max-model-len is {facts.max_model_len}, and prompt and response may have {settings.max_model_len} "
            "tokens. Raise it, or lower generator.max_input_length or max_generate_length"
        )
    if facts.dtype != settings.generator.model_dtype:
        problems.append(
            f"its --dtype is {facts.dtype} and generator.model_dtype is {settings.generator.model_dtype}. Use the same"
        )
    if facts.logprobs_mode != "processed_logprobs":
        problems.append(
            f"its logprobs are {facts.logprobs_mode}, not those of the sampling distribution. Start it with "
            "--logprobs-mode processed_logprobs"
        )
    if facts.max_new_tokens is not None:
        problems.append(
            f"its --override-generation-config has max_new_tokens {facts.max_new_tokens}, which would cut longer "
            "responses. Start it without"
        )
    if facts.data_parallel_size > 1:
        problems.append(
            f"its data parallel size is {facts.data_parallel_size}. Start one server per replica and list them all in "
            "generator.remote_inference_engine_urls"
        )
    wants_stock = transport(settings.generator.weight_sync_backend).for_stock_servers
    if wants_stock and facts.backend != "nccl":
        problems.append(
            f"its weight transfer backend is {facts.backend} and generator.weight_sync_backend is "
            f"{settings.generator.weight_sync_backend}: start it with --weight-transfer-config "
            """'{"backend": "nccl"}'"""
        )
    elif not wants_stock and facts.backend == "nccl":
        problems.append(
            f"its weight transfer backend is vLLM's own: set generator.weight_sync_backend={STOCK}, or start it with "
            + _own_backend()
        )
    elif not wants_stock and (facts.backend != "skyrl" or not facts.has_extension):
        problems.append(f"its weight transfer backend is {facts.backend}: start it with {_own_backend()}")
    if problems:
        raise ServerUnsuitableError(f"the server {settings.url} (vLLM {facts.version}): " + "; ".join(problems))


async def check_tokenizer(client: ServerClient, model_path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    """Return the policy's tokenizer. Raises: ServerUnsuitableError if the server's vocabulary is another."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model_path, trust_remote_code=trust_remote_code)
    expected = tokenizer.encode(PROBE_TEXT, add_special_tokens=False)
    try:
        answer = await client.post("/tokenize", {"prompt": PROBE_TEXT, "add_special_tokens": False}, PROBE_S)
    except ServerError as error:
        raise ServerUnsuitableError(f"the server {client.url} cannot tokenize: {error}") from error
    if (found := answer["tokens"]) != expected:
        raise ServerUnsuitableError(
            f"the server {client.url} has another vocabulary than {model_path}: its tokens of a probe text are "
            f"{found[:8]}..., the policy's are {expected[:8]}.... Serve the policy's model"
        )
    return tokenizer


def _own_backend() -> str:
    return f"""--weight-transfer-config '{{"backend": "skyrl"}}' --worker-extension-cls {EXTENSION}"""
