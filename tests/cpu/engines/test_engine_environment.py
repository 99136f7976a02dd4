"""What an engine is started with: its mode on each device, and variables that it must not inherit."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from skyrl_train.config import load_config
from skyrl_train.engines.graphs import graph_sizes
from skyrl_train.engines.settings import CLOSED, engine_arguments, engine_environment, seeds_requests, set_environment
from tests.support.settings import MIB, engine_settings

SETTINGS = engine_settings("model", "name", "float32", 64, kv_cache_memory_gb=MIB)


@pytest.mark.parametrize(
    ("chosen", "device", "eager"),
    [(None, "cuda", False), (None, "cpu", True), (True, "cuda", True), (False, "cpu", False)],
)
def test_cuda_graphs_are_used_on_gpus_unless_eager_mode_is_chosen(chosen: bool | None, device: str, eager: bool):
    settings = engine_settings("model", "name", "float32", 64, enforce_eager=chosen, kv_cache_memory_gb=MIB)
    assert engine_arguments(settings, device)["enforce_eager"] is eager
    environment = engine_environment(settings, device)
    assert ("TORCHDYNAMO_DISABLE" in environment) == (eager and device == "cpu")
    assert ("TRITON_CACHE_DIR" in environment) == ("TORCHINDUCTOR_CACHE_DIR" in environment) == (not eager)


@pytest.mark.parametrize(("sequences", "tokens"), [(1, 16), (8, 64), (100, 2048), (512, 16384), (1000, 16384)])
def test_cuda_graphs_cover_all_decoding_and_prompts_that_join_it(sequences: int, tokens: int):
    sizes = graph_sizes(sequences, tokens)
    assert sizes == sorted(set(sizes)) and sequences in sizes
    assert sizes[-1] == max(sequences, min(tokens, 1024))
    graph_of = {step: min(size for size in sizes if size >= step) for step in range(1, sizes[-1] + 1)}
    for step, size in graph_of.items():
        assert size - step < (16 if step <= sequences else 64)


@pytest.mark.parametrize(
    ("values", "is_chosen"),
    [
        ({}, True),
        ({"enforce_eager": True}, False),
        ({"engine_init_kwargs": {"cudagraph_capture_sizes": [64]}}, False),
        ({"engine_init_kwargs": {"max_cudagraph_capture_size": 64}}, False),
        ({"engine_init_kwargs": {"compilation_config": {"cudagraph_capture_sizes": [64]}}}, False),
        ({"engine_init_kwargs": {"speculative_config": {"method": "ngram"}}}, False),
        ({"engine_init_kwargs": {"spec_method": "ngram", "spec_tokens": 4}}, False),
        ({"engine_init_kwargs": {"performance_mode": "interactivity"}}, False),
    ],
)
def test_graphs_are_those_that_users_choose(values: dict[str, Any], is_chosen: bool):
    settings = engine_settings("m", "m", "float32", 8, max_num_seqs=1000, **values)
    own = values.get("engine_init_kwargs", {})
    found = {name: value for name, value in engine_arguments(settings, "cuda").items() if "cudagraph" in name}
    expected = {"cudagraph_capture_sizes": graph_sizes(1000, 8000)} if is_chosen else {}
    assert found == expected | {name: value for name, value in own.items() if "cudagraph" in name}


def test_a_step_has_room_for_a_prompt_of_the_length_that_users_give_to_vllm():
    given = engine_settings("m", "m", "float32", 64, kv_cache_memory_gb=MIB, engine_init_kwargs={"max_model_len": 9000})
    assert engine_arguments(given, "cpu")["max_num_batched_tokens"] >= 9000


@pytest.mark.parametrize("sequences", [1, 3, 40, 256, 4096])
@pytest.mark.parametrize("longest", [16, 24, 1000, 32768])
@pytest.mark.parametrize("asked", [64, 1000, 8192, 16384])
def test_no_dummy_request_of_the_warm_up_is_longer_than_an_engine_takes(sequences: int, longest: int, asked: int):
    """vLLM 0.26 gives each its part of a step's tokens, and one the rest of the division."""
    settings = engine_settings("m", "m", "float32", longest, max_num_seqs=sequences, max_num_batched_tokens=asked)
    tokens = engine_arguments(settings, "cuda")["max_num_batched_tokens"]
    requests = min(sequences, tokens)
    assert tokens // requests + tokens % requests <= longest
    assert longest <= tokens <= max(asked, longest)
    assert tokens > min(asked, sequences * longest) - sequences, "and all that were asked for but that rest"


@pytest.mark.parametrize(
    ("chosen", "device", "seeded"), [(None, "cuda", False), (None, "cpu", True), (True, "cuda", True)]
)
def test_requests_have_seeds_where_sampling_one_by_one_costs_nothing(chosen: bool | None, device: str, seeded: bool):
    assert seeds_requests(engine_settings("model", "name", "float32", 64, seed_requests=chosen), device) is seeded


@pytest.mark.parametrize(("chosen", "passed"), [(None, None), ("fp8", "fp8_per_channel")])
def test_engines_quantise_only_if_asked(chosen: str | None, passed: str | None):
    settings = engine_settings("model", "name", "bfloat16", 64, quantization=chosen)
    assert engine_arguments(settings, "cuda").get("quantization") == passed


@pytest.mark.parametrize(
    ("name", "is_quantised"),
    [
        ("mlp.gate", False),
        ("mlp.shared_expert_gate", False),
        ("mlp.gate_up_proj", True),
        ("self_attn.qkv_proj", True),
    ],
)
def test_routers_are_not_quantised(name: str, is_quantised: bool):
    from vllm.config.quantization import resolve_quantization_config
    from vllm.model_executor.layers.linear import ReplicatedLinear
    from vllm.model_executor.layers.quantization.online.base import OnlineQuantizationConfig

    given = engine_arguments(engine_settings("model", "name", "bfloat16", 64, quantization="fp8"), "cuda")
    config = OnlineQuantizationConfig(resolve_quantization_config(given["quantization"], given["quantization_config"]))
    method = config.resolve_quant_method_cls(ReplicatedLinear, f"model.layers.0.{name}")
    assert ("Fp8" in str(method)) == is_quantised


@pytest.mark.slow
def test_engines_that_start_at_once_look_for_ports_in_different_places_where_no_connection_begins():
    """What vLLM chooses itself is a port of outgoing connections, which another process may have when it listens."""
    ports = []
    for _ in range(2):
        environment = os.environ | engine_environment(SETTINGS, "cpu")
        program = "from vllm.utils.network_utils import get_open_port; print(get_open_port())"
        printed = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, check=True)
        ports.append(int(printed.stdout.split()[-1]))
    assert len(set(ports)) == 2 and all(20_000 <= port < 32_768 for port in ports)


def test_the_mode_of_engines_is_left_open_by_the_configuration():
    assert load_config().generator.enforce_eager is None and load_config().generator.seed_requests is None
    assert load_config(["generator.enforce_eager=true"]).generator.enforce_eager is True


def test_an_engine_does_not_inherit_what_opens_it_to_others(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(os, "environ", {"VLLM_SERVER_DEV_MODE": "1", "VLLM_API_KEY": "secret", "VLLM_PORT": "1"})
    set_environment(SETTINGS, "cpu")
    assert {name: os.environ.get(name) for name in CLOSED} == CLOSED
    assert os.environ["VLLM_PORT"] == "1"
    assert [record.getMessage().split()[0] for record in caplog.records] == ["VLLM_SERVER_DEV_MODE", "VLLM_API_KEY"]


@pytest.mark.slow
def test_vllm_reads_every_closed_variable_as_closed():
    """A renamed variable would close nothing."""
    program = (
        "from skyrl_train.engines.settings import CLOSED; import vllm.envs as envs; "
        "names = [name for name in CLOSED if getattr(envs, name)]; assert names == [], names"
    )
    closed = {name: value for name, value in CLOSED.items() if value is not None}
    environment = {name: value for name, value in os.environ.items() if name not in CLOSED}
    subprocess.run([sys.executable, "-c", program], env=environment | closed, check=True)
