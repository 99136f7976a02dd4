"""vLLM's HTTP interface of several versions, as far as a weight update needs it: a state machine without a model."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web
from transformers import AutoTokenizer

from skyrl_train.engines.settings import EXTENSION

PACKED = ("packed", "packed_buffer_size_bytes", "packed_num_buffers")
INIT_FIELDS = {"master_address", "master_port", "rank_offset", "world_size"}
UPDATE_FIELDS = {"names", "dtype_names", "shapes"}


@dataclass
class FakeServer:
    """One server; the fields are how it was started and what has become of it."""

    version: str
    tokenizer_path: str
    backend: str | None = "skyrl"
    extension: str = EXTENSION
    api_key: str | None = None
    dev_mode: bool = True
    openapi: bool = True
    dtype: str = "float32"
    max_model_len: int = 64
    logprobs_mode: str = "processed_logprobs"
    override_generation_config: dict[str, Any] = field(default_factory=dict)
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    digests: dict[str, int] = field(default_factory=dict)
    faults: list[str] = field(default_factory=list)
    fail_update: bool = False
    cache_is_held: bool = False
    calls: list[str] = field(default_factory=list)
    """Paths in the order in which they were asked for."""
    bodies: dict[str, Any] = field(default_factory=dict)
    """The last body of each path."""
    paused: bool = False
    is_connected: bool = False
    update_is_active: bool = False
    has_open_layers: bool = False
    """Layers that a failed update gave a part of their tensors."""
    has_mixed_layers: bool = False
    """They were filled up by another update."""
    packed: dict[str, Any] | None = None
    label: str | None = None

    @property
    def number(self) -> tuple[int, ...]:
        return tuple(int(part) for part in self.version.split(".")[:2])

    def routes(self) -> dict[str, Any]:
        found: dict[str, Any] = {
            "/health": lambda body, query: None,
            "/version": lambda body, query: {"version": self.version},
            "/v1/models": lambda body, query: {
                "data": [{"id": "served", "parent": None, "max_model_len": self.max_model_len}]
            },
            "/v1/completions": self.complete,
            "/tokenize": self.tokenize,
        }
        if not self.dev_mode:
            return found
        found |= {
            "/server_info": self.server_info,
            "/pause": self.pause,
            "/resume": self.resume,
            "/init_weight_transfer_engine": self.init,
            "/update_weights": self.update,
            "/collective_rpc": self.rpc,
            "/reset_prefix_cache": lambda body, query: {"success": not self.cache_is_held},
        }
        if self.number >= (0, 21):
            found |= {"/start_weight_update": self.start, "/finish_weight_update": self.finish}
        if self.number >= (0, 27):
            found |= {"/update_weight_version": self.relabel}
        if self.number >= (0, 32):
            found |= {"/shutdown_weight_transfer_engine": self.disconnect}
        return found

    def server_info(self, body: Any, query: Any) -> Any:
        assert query["config_format"] == "json"
        return {
            "vllm_config": {
                "model_config": {
                    "model": "served",
                    "max_model_len": self.max_model_len,
                    "dtype": f"torch.{self.dtype}",
                    "logprobs_mode": self.logprobs_mode,
                    "override_generation_config": self.override_generation_config,
                },
                "parallel_config": {
                    "tensor_parallel_size": self.tensor_parallel_size,
                    "pipeline_parallel_size": 1,
                    "data_parallel_size": self.data_parallel_size,
                    "worker_extension_cls": self.extension,
                },
                "weight_transfer_config": None if self.backend is None else {"backend": self.backend},
            }
        }

    def tokenize(self, body: Any, query: Any) -> Any:
        tokenizer = AutoTokenizer.from_pretrained(self.tokenizer_path)
        return {"tokens": tokenizer.encode(body["prompt"], add_special_tokens=body["add_special_tokens"])}

    def complete(self, body: Any, query: Any) -> Any:
        refuse(self.paused or self.update_is_active, "a step on half-loaded weights")
        sampled = body["prompt"][::-1][: body["max_tokens"]]
        logprobs = {"token_logprobs": [-0.5 * token for token in sampled]}
        choice = {"text": "text", "token_ids": sampled, "finish_reason": "length", "logprobs": logprobs}
        if "prompt_logprobs" in body:
            likeliest = {"1": {"logprob": -0.1}}  # vLLM adds others
            rows = [likeliest | {str(token): {"logprob": -0.5 * token}} for token in body["prompt"][1:]]
            choice["prompt_logprobs"] = [None, *rows]
        return {"choices": [choice]}

    def pause(self, body: Any, query: Any) -> Any:
        assert query["mode"] in ("abort", "wait", "keep") and query["clear_cache"] == "true"
        self.paused = True

    def resume(self, body: Any, query: Any) -> Any:
        self.paused = False

    def init(self, body: Any, query: Any) -> Any:
        info = body["init_info"]
        if self.backend == "nccl":
            at_init = self.number >= (0, 28)
            check_fields(info, INIT_FIELDS, PACKED if at_init else ())
            self.packed = {name: info[name] for name in PACKED if name in info} if at_init else None
        else:
            check_fields(info, {"info"}, ())
        self.is_connected = True

    def disconnect(self, body: Any, query: Any) -> Any:
        refuse(self.update_is_active, "Cannot release a trainer connection during a weight update")
        self.is_connected = False

    def start(self, body: Any, query: Any) -> Any:
        refuse(not self.is_connected, "not connected")
        refuse(self.update_is_active, "start_weight_update called while a weight update is already active.")
        self.update_is_active = True

    def update(self, body: Any, query: Any) -> Any:
        refuse(not self.update_is_active, "start_weight_update must be called before update_weights.")
        info = body["update_info"]
        try:
            refuse(self.fail_update, "tensor 'lm_head.weight' does not fit")
            if self.backend == "nccl":
                at_update = self.number < (0, 28)
                check_fields(info, UPDATE_FIELDS, PACKED if at_update else ())
                if at_update:
                    self.packed = {name: info[name] for name in PACKED if name in info}
            else:
                check_fields(info, {"message"}, ())
        except web.HTTPError:
            self.update_is_active = False
            self.has_open_layers = True
            raise
        self.has_mixed_layers |= self.has_open_layers

    def finish(self, body: Any, query: Any) -> Any:
        refuse(not self.update_is_active, "finish_weight_update called without a matching start_weight_update.")
        self.update_is_active = self.has_open_layers = False

    def relabel(self, body: Any, query: Any) -> Any:
        self.label = body["new_version"]

    def rpc(self, body: Any, query: Any) -> Any:
        refuse(not self.extension, f"Method {body['method']!r} is not implemented.")
        if body["method"] == "skyrl_close_update":
            self.update_is_active = self.has_open_layers = False
            return {"results": [None] * self.tensor_parallel_size}
        report = {"digests": self.digests, "faults": self.faults}
        return {"results": [report] * self.tensor_parallel_size}


def refuse(condition: object, message: str) -> None:
    if condition:
        text = json.dumps({"error": {"message": message, "code": 500}})
        raise web.HTTPInternalServerError(text=text, content_type="application/json")


def check_fields(info: dict[str, Any], needed: set[str], allowed: tuple[str, ...]) -> None:
    refuse(needed - info.keys() or info.keys() - needed - set(allowed), f"Invalid info: {sorted(info)}")


@asynccontextmanager
async def serving(server: FakeServer) -> AsyncIterator[str]:
    """The server's URL, while it runs."""

    async def answer(request: web.Request) -> web.Response:
        server.calls.append(request.path)
        allowed = server.api_key is None or request.headers.get("Authorization") == f"Bearer {server.api_key}"
        if request.path.startswith("/v1") and not allowed:
            return web.json_response({"error": "Unauthorized"}, status=401)
        routes = server.routes()
        if request.path == "/openapi.json" and server.openapi:
            return web.json_response({"paths": dict.fromkeys(routes)})
        if request.path not in routes:
            return web.json_response({"detail": "Not Found"}, status=404)
        text = await request.text()
        body = json.loads(text) if text else None
        server.bodies[request.path] = body
        return web.json_response(routes[request.path](body, request.query))

    app = web.Application(client_max_size=2**30)
    app.router.add_route("*", "/{path:.*}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()
