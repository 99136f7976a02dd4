"""Values that cannot work together are refused at once, before anything heavy starts, each with its cure."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.algorithms.build import algorithm_problems
from skyrl_train.checks.model import looks_local
from skyrl_train.checks.rl import check
from skyrl_train.config import ConfigError, load_config
from skyrl_train.config.algorithm import PLACES

OWN_HUBER = """
from skyrl_train.algorithms.inputs import LossTerms

def free(tokens, *, width):
    return LossTerms(-tokens.logprobs * tokens.advantages * width)

def needed(tokens, *, delta):
    return LossTerms(-tokens.logprobs * tokens.advantages * delta)

def with_default(tokens, *, delta=1.0):
    return LossTerms(-tokens.logprobs * tokens.advantages * delta)
"""

MEGATRON = "trainer.policy.megatron_config"
URLS = "generator.remote_inference_engine_urls"
REMOTE = ["generator.run_engines_locally=false", f"{URLS}=[http://h:8000]"]
STOCK = "generator.weight_sync_backend=vllm_nccl"
SMALL = ["trainer.train_batch_size=8", "trainer.policy_mini_batch_size=4"]

SERVERS = "generator.remote_inference_engine_urls=['http://127.0.0.1:9']"
TWO_ENGINES = ["generator.num_inference_engines=2"]


def problems(*overrides: str, num_train_prompts: int | None = 100, files: bool = False) -> tuple[str, ...]:
    config = load_config([*SMALL, *overrides])
    try:
        check(config, num_train_prompts=num_train_prompts, files=files)
    except ConfigError as error:
        return error.problems
    return ()


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("train.jsonl").write_text("{}\n")
    return tmp_path


def model(path: str, **values: object) -> str:
    """A folder with a config.json, as an override."""
    shape = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 4} | values
    Path(path).mkdir(parents=True)
    Path(path, "config.json").write_text(json.dumps(shape))
    return f"trainer.policy.model.path={path}"


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.2", "localhost", "::1"])
def test_an_endpoint_that_only_this_computer_reaches_needs_no_key(host: str):
    assert problems("generator.enable_http_endpoint=true", f"generator.http_endpoint_host='{host}'") == ()


def test_an_endpoint_with_a_key_may_listen_anywhere_and_one_that_is_off_need_not_be_right():
    anywhere = "generator.http_endpoint_host=0.0.0.0"
    assert problems("generator.enable_http_endpoint=true", anywhere, "generator.http_api_key=x") == ()
    assert problems(anywhere) == ()


DISTILLATION = "trainer.algorithm.distillation.distillation"
OWN, HINT = "trainer.teacher.backend=policy", f"{DISTILLATION}_hint="
SERVED = "trainer.teacher.backend=engine"
TYPE, TEACHER = f"{DISTILLATION}_type=", "trainer.teacher.model.path=model"
LOSS, ENGINES = "trainer.algorithm.policy_loss_type", "generator.num_inference_engines=4"
SOURCES, NO_KL = "trainer.teacher.model.path_of_data_source=", "trainer.algorithm.use_kl_loss=false"


def test_the_base_and_the_quickstart_pass():
    assert problems() == ()
    assert problems("+experiment=quickstart", "trainer.train_batch_size=128", num_train_prompts=128) == ()


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["trainer.policy_mini_batch_size=3"], "not a multiple of trainer.policy_mini_batch_size 3. .* such as 2"),
        (
            ["trainer.train_batch_size=104"],
            "is 104: more than the 100 prompts of data.train_data. Set it to at most 100",
        ),
        *[
            (overrides, expected)
            for overrides, expected in (
                ([TYPE + "advantage"], "distillation_type is advantage: there is no teacher. Set trainer.teacher"),
                (["trainer.teacher.model.path=model"], "nothing in the objective reads it. Set .*=advantage, or"),
                ([TEACHER, TYPE + "loss", f"{DISTILLATION}_kl_estimator=k1"], "is k1: the expected gradient .* is 0"),
                ([TEACHER, TYPE + "loss", f"{DISTILLATION}_coef=0"], "coef is 0: .* Set distillation_type=null"),
                (
                    [TEACHER, TYPE + "advantage", f"{LOSS}=clip_cov"],
                    "clip_cov selects tokens by the .* rewards alone. Use",
                ),
                (["trainer.algorithm.advantage_estimator=zero", NO_KL], "is zero: without distillation .* no gradient"),
                ([TYPE + "loss", SOURCES + "{math: 3}"], "path_of_data_source.math is 3: it must be the path"),
                (
                    [SERVED, TEACHER, TYPE + "loss", "generator.sampling_params.temperature=0.7"],
                    "backend is engine and .*temperature is 0.7: engines score given tokens at temperature 1 only",
                ),
                (
                    [SERVED, TEACHER, TYPE + "topk_forward"],
                    "distillation_type is topk_forward: engines report logprobs of the sampled tokens only",
                ),
                (
                    [SERVED, TEACHER, TYPE + "loss", "trainer.placement.colocate_all=true"],
                    "colocate_all is true: the engines of a teacher need dedicated devices",
                ),
                (
                    [SERVED, TEACHER, f"{LOSS}=skyrl_train.algorithms.distillation:topk_reverse"],
                    "backend is engine and a function reads topk_logprobs: engines report",
                ),
                (
                    ["trainer.teacher.backend=remote", TEACHER, TYPE + "loss"],
                    "backend is remote and trainer.teacher.model.path is model: it must be a running server, written http://host:port",
                ),
                (
                    ["trainer.teacher.model.path=http://h:8000", TYPE + "loss"],
                    "is megatron and trainer.teacher.model.path is http://h:8000: it must be a model",
                ),
                (
                    ["trainer.teacher.backend=remote", "trainer.teacher.model.path=http://h:8000/v1", TYPE + "loss"],
                    "path is http://h:8000/v1: it must be a running server, written http://host:port without /v1",
                ),
                (
                    [
                        *("trainer.teacher.backend=remote", "trainer.teacher.model.path=http://h:8000", TYPE + "loss"),
                        "generator.remote_api_key_env=NO_SUCH_KEY",
                    ],
                    "remote_api_key_env is NO_SUCH_KEY: this environment variable is not set",
                ),
                ([OWN, TYPE + "loss"], "backend is policy: without a hint, .* Set .*distillation_hint"),
                ([OWN, TEACHER, TYPE + "loss", HINT + "'{prompt} {answer}'"], "policy and trainer.teacher.model has a"),
                ([HINT + "'{prompt} {answer}'"], "hint is set, but there is no teacher"),
                ([OWN, TYPE + "loss", HINT + "'the answer is {answer}'"], r"Put \{prompt\} where the row's own"),
                ([OWN, TYPE + "loss", HINT + "'{prompt'"], r"expected '}' before end of string. Write a literal brace"),
                ([OWN, TYPE + "loss", HINT + "answer"], "distillation_hint is 'answer': write module:attribute"),
                ([OWN, TYPE + "loss", HINT + "os:getcwd"], r"must be a function of \(group, sample\)"),
                (
                    [TEACHER, TYPE + "loss", "trainer.teacher.megatron_config.context_parallel_size=2"],
                    "trainer.placement.teacher_num_nodes .* is 1 ranks",
                ),
            )
        ],
        (
            [
                *("trainer.algorithm.advantage_estimator=gdpo", "trainer.algorithm.use_kl_loss=false"),
                "trainer.algorithm.use_kl_in_reward=true",
            ],
            "use_kl_in_reward is true: gdpo reads named rewards alone",
        ),
        (
            [
                *("trainer.algorithm.advantage_estimator=zero", "trainer.algorithm.use_kl_loss=false"),
                *("trainer.algorithm.use_kl_in_reward=true", "trainer.algorithm.policy_loss_type=cross_entropy"),
            ],
            "use_kl_in_reward is true: zero reads no reward, nor the penalty",
        ),
        *[
            (
                [
                    *("generator.n_samples_per_prompt=1", "trainer.algorithm.advantage_estimator=reinforce++"),
                    f"trainer.algorithm.{key}",
                ],
                ".* is set and generator.n_samples_per_prompt is 1: the reward of one sample differs from no other",
            )
            for key in ("zero_variance_filter=true", "dynamic_sampling.type=filter")
        ],
        (["trainer.algorithm.kl_ctrl.type=adaptive"], "kl_ctrl.type is adaptive: .*use_kl_in_reward=true"),
        (["trainer.algorithm.adaptive_entropy.target_entropy=0.2"], "target_entropy is set: .*use_entropy_loss=true"),
        (["trainer.algorithm.use_kl_in_reward=true"], "both true: the KL term .* Set one of them to false"),
        (
            ["trainer.algorithm.use_unbiased_kl=true", "trainer.algorithm.use_kl_loss=false"],
            "use_unbiased_kl is true: .* use_kl_loss is false. Set use_unbiased_kl=false or use_kl_loss=true",
        ),
        *[
            (
                [f"trainer.algorithm.policy_loss_type={loss}", "trainer.algorithm.corrections=[opsm,token_tis,icepop]"],
                f"corrections has token_tis, icepop: the ratio of {loss} is already .* Remove it",
            )
            for loss in ("dppo", "rollout_is")
        ],
        (
            ["trainer.algorithm.corrections=[token_tis,geometric_mask,icepop]"],
            "corrections has token_tis, icepop: each weighs .* count twice. Keep one of them",
        ),
        (
            ["trainer.algorithm.corrections=[opsm]", "trainer.policy_mini_batch_size=8"],
            "corrections has opsm: .* each update makes one step. Lower trainer.policy_mini_batch_size",
        ),
        (
            ["trainer.algorithm.off_policy_correction.icepop_low=6"],
            "off_policy_correction.icepop_low is 6: above icepop_high 5, so nothing lies between. Swap them",
        ),
        (["trainer.algorithm.clip_cov.clip_cov_lb=9"], "clip_cov.clip_cov_lb is 9: above clip_cov_ub 5"),
        (["trainer.algorithm.kl_estimator_type=k1"], "is k1: the expected gradient of .* is 0. Use k2 or k1"),
        *[
            (
                ["trainer.algorithm.use_unbiased_kl=true", f"trainer.algorithm.kl_estimator_type={name}"],
                "use_unbiased_kl is true and kl_estimator_type is .* is not that of the KL .* kl_estimator_type=k3",
            )
            for name in ("k2", "abs", "k1+", "k3+", "abs+")
        ],
        (
            [
                *("trainer.algorithm.use_kl_loss=false", "trainer.algorithm.use_kl_in_reward=true"),
                *("trainer.algorithm.kl_ctrl.type=adaptive", "trainer.algorithm.kl_loss_coef=0"),
            ],
            "kl_loss_coef is 0 and kl_ctrl.type is adaptive: .* it would stay 0",
        ),
        (
            ["trainer.algorithm.overlong_buffer.len=9999"],
            "overlong_buffer.len is 9999: it is above .* at most that value",
        ),
        (
            [
                "trainer.algorithm.dynamic_sampling.type=filter",
                "trainer.source=skyrl_train.rollout.source:OnPolicySource",
            ],
            "dynamic_sampling.type is filter: only the sources on_policy and streaming apply it",
        ),
        (
            ["trainer.over_sampling_batch_size=99", "trainer.source=streaming"],
            "over_sampling_batch_size is 99: trainer.source is streaming",
        ),
        (
            ["trainer.over_sampling_batch_size=99", "trainer.algorithm.dynamic_sampling.type=replace"],
            "over_sampling_batch_size is 99 and .*type is replace: .* Set dynamic_sampling.type=filter or null",
        ),
        (
            ["trainer.over_sampling_batch_size=8"],
            "is 8: not more than trainer.train_batch_size 8.* or to null",
        ),
        (["trainer.over_sampling_batch_size=101"], "is 101: more than the 100 prompts .* Set it to at most 100"),
        (["generator.n_samples_per_prompt=1"], "n_samples_per_prompt is 1: grpo compares .* at least 2"),
        (
            ["generator.enable_http_endpoint=true", "generator.http_endpoint_host=0.0.0.0"],
            "http_endpoint_host is 0.0.0.0 and http_api_key is null: anyone .* Set .*http_api_key .*host=127.0.0.1",
        ),
        (
            ["generator.enable_http_endpoint=true", "generator.run_engines_locally=false", SERVERS],
            "enable_http_endpoint is true and .* have their own endpoints. Set enable_http_endpoint=false",
        ),
        (
            ["generator.enable_http_endpoint=true", "generator.http_endpoint_port=65535", *TWO_ENGINES],
            "http_endpoint_port is 65535: 2 engines would need ports above 65535. Set it to at most 65534",
        ),
        (["generator.sampling_params.temperature=0"], "temperature is 0: .* Set it above 0"),
        (
            ["generator.sampling_params.temperature=2.5"],
            r"generator.sampling_params.temperature is 2.5: vLLM samples from 0.01 to 2.0, or 0 for greedy",
        ),
        (
            ["generator.eval_sampling_params.stop=''"],
            r"sampling_params.stop is \[''\]: an empty text stops nothing. Write",
        ),
        (["generator.engine_init_kwargs.speculative_config=ngram"], "speculative_config is 'ngram': write its fields"),
        (["generator.sampling_params.temperature=0.005"], "sampling_params.temperature is 0.005: vLLM samples from"),
        ([*REMOTE, "generator.eval_sampling_params.temperature=3"], "eval_sampling_params.temperature is 3.0: vLLM"),
        (
            ["generator.sampling_params.top_p=0.9"],
            r"sampling_params.top_p is 0.9: the engine would .* Set it to 1.0 \(",
        ),
        (["trainer.logprob_difference={warn: 0.2, fail: 0.1}"], "fail is 0.1: it is below .*warn 0.2. Set it to at"),
        (["generator.sampling_params.top_k=20"], r"sampling_params.top_k is 20: .* Set it to -1 \(evaluation may"),
        (["generator.sampling_params.min_p=0.1"], r"sampling_params.min_p is 0.1: .* Set it to 0.0 \("),
        *[
            ([f"generator.engine_init_kwargs.{name}={value}"], f"{name} is .*from the distribution .* Remove {name}$")
            for name, value in {
                "generation_config": "auto",
                "override_generation_config": "{top_k: 1}",
                "hf_overrides": "{rope_theta: 5}",
                "hf_config_path": "other",
                "logits_processors": "[mine:Mine]",
                "watermark_config": "{}",
            }.items()
        ],
        (
            ["generator.engine_init_kwargs.speculative_config={rejection_sample_method: synthetic}"],
            "synthetic acceptance keeps tokens that the model did not sample. Use the method standard",
        ),
        (
            ["trainer.resume_mode=from_path"],
            "resume_path is null: no checkpoint is named. Set resume_path to",
        ),
        (
            ["trainer.resume_path=x"],
            "resume_path is x and trainer.resume_mode is null: .* Set resume_mode=from_path",
        ),
        (["trainer.prepare=quickstart"], "trainer.prepare is 'quickstart': .* Write module:function, or null"),
        (
            ["generator.max_input_length=100"],
            "max_input_length is 100: .*max_prompt_length 512 .* Set it to at least 512",
        ),
        (
            ["generator.engine_init_kwargs.tensor_parallel_size=4"],
            r"tensor_parallel_size is 4: .* Remove it and set generator\.inference_engine_tensor_parallel_size",
        ),
        (["generator.engine_init_kwargs.max_num_seqs=4"], r"is 4: .* Remove it and set generator\.max_num_seqs$"),
        (
            ["generator.engine_init_kwargs.logprobs_mode=raw_logprobs"],
            "logprobs_mode is 'raw_logprobs': this argument is managed by skyrl_train. Remove it",
        ),
        (
            ["generator.engine_init_kwargs.enable_chuncked_prefill=true"],
            "chuncked_prefill is set: AsyncEngineArgs has no such field; did you mean enable_chunked_prefill\\?$",
        ),
        (
            [f"{MEGATRON}.transformer_config_kwargs={{num_layers_in_last_pipline_stage: 3}}"],
            f"^{MEGATRON}.transformer_config_kwargs.num_layers_in_last_pipline_stage is set: TransformerConfig has no "
            "such field; did you mean num_layers_in_last_pipeline_stage\\?$",
        ),
        ([f"{MEGATRON}.transformer_config_kwargs={{foo: 3}}"], "foo is set: .* has no such field. Remove it$"),
        *(
            (
                [f"{MEGATRON}.transformer_config_kwargs={{{name}: 1}}"],
                f"^{MEGATRON}.*_kwargs.{name} cannot be set: {why}",
            )
            for name, why in [
                ("calculate_per_token_loss", "the gradient would depend on the number of micro-batches"),
                ("moe_z_loss_coeff", "Megatron scales it with the tokens of each micro-batch"),
                ("moe_expert_capacity_factor", "tokens would be dropped micro-batch by micro-batch"),
                ("attention_dropout", "the engines' models have no such noise"),
                ("window_size", "tokens attend to their whole sample"),
                ("tensor_model_parallel_size", "set megatron_config.tensor_model_parallel_size"),
                ("batch_p2p_comm", "stages send both directions at once"),
                ("qk_layernorm", "it follows from the model's config.json, .* Remove it"),
                ("softmax_scale", "it follows from the model's config.json, .* Remove it"),
            ]
        ),
        (["generator.engine_init_kwargs.max_model_len=8k"], r"max_model_len is '8k': write a number of tokens"),
        (["generator.engine_init_kwargs.max_model_len=1000"], r"is 1536 tokens: more than .*max_model_len 1000"),
        ([f"{MEGATRON}.tensor_model_parallel_size=2"], "is 1 ranks: not a multiple of .* = 2. Add ranks or lower"),
        (
            ["trainer.placement.policy_num_gpus_per_node=6", f"{MEGATRON}.pipeline_model_parallel_size=4"],
            "is 6 ranks: not a multiple of .*pipeline 4",
        ),
        (
            ["trainer.placement.policy_num_gpus_per_node=4", f"{MEGATRON}.expert_model_parallel_size=8"],
            "is 4 ranks: not a multiple of .* expert 8 x expert tensor 1 x pipeline 1 = 8",
        ),
        ([f"{MEGATRON}.virtual_pipeline_model_parallel_size=2"], "needs a pipeline of at least 2"),
        (
            [f"{MEGATRON}.recompute_granularity=selective", f"{MEGATRON}.recompute_modules=[]"],
            "recompute_modules is empty: .* Name modules",
        ),
        (
            [f"{MEGATRON}.recompute_granularity=null", f"{MEGATRON}.recompute_num_layers=4"],
            "recompute_num_layers is 4 and recompute_granularity is null: .* Set recompute_granularity=full",
        ),
        (
            [f"{MEGATRON}.torch_profiler_config.enable=true", f"{MEGATRON}.torch_profiler_config.ranks=[7]"],
            "no such rank exists. Name ranks from 0 to 0",
        ),
        (
            [f"{MEGATRON}.torch_profiler_config.enable=true", f"{MEGATRON}.torch_profiler_config.steps=[]"],
            "steps is empty: nothing would be traced",
        ),
        (["trainer.ref.megatron_config.context_parallel_size=2"], "trainer.placement.ref_num_nodes .* is 1 ranks"),
        (["generator.run_engines_locally=false"], "remote_inference_engine_urls is empty: .* Name the servers"),
        ([f"{URLS}=[http://h:8000]"], "names 1 servers .* Set run_engines_locally=false"),
        (
            [*REMOTE, f"{URLS}=[http://h:8000/v1]"],
            "contains 'http://h:8000/v1': .* Write http://host:port, without",
        ),
        ([*REMOTE, f"{URLS}=[http://h:1,http://h:2,http://h:1]"], "contains http://h:1 twice"),
        (
            ["generator.quantization=fp8", "generator.model_dtype=float32"],
            "quantization is fp8 and .*model_dtype is float32: .* Set generator.model_dtype=bfloat16",
        ),
        (
            ["generator.engine_init_kwargs.quantization=fp8"],
            "quantization is 'fp8': this argument has its own key. Remove it and set generator.quantization",
        ),
        (
            [*REMOTE, f"{URLS}=[http://h:1]", "generator.quantization=fp8"],
            "quantization is fp8 and .*run_engines_locally is false: running servers .* Set quantization=null",
        ),
        (["generator.weight_sync_backend=mpi"], "is mpi: .* one of auto, shm, broadcast"),
        ([STOCK], "vllm_nccl: it is for stock vLLM servers .*. Use auto"),
        ([*REMOTE, STOCK, "trainer.verify_sync_every=0"], "comparing logprobs is the only check. Set it to at least 1"),
        ([*REMOTE, "generator.remote_api_key_env=NOT_SET"], "NOT_SET: this environment variable is not set"),
    ],
)
def test_values_that_do_not_fit_are_one_sentence_with_the_cure(overrides: list[str], expected: str):
    (problem,) = problems(*overrides)
    assert re.search(expected, problem), problem


def test_evaluation_may_truncate_and_speculate_exactly():
    eval_params = "generator.eval_sampling_params={temperature: 0.6, top_p: 0.9, top_k: 20, min_p: 0.1}"
    drafts = "generator.engine_init_kwargs.speculative_config={method: ngram, num_speculative_tokens: 2}"
    assert problems(eval_params, drafts) == ()


def test_remote_engines_pass_with_servers_and_the_key_of_a_variable(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("KEY_OF_A_TEST", "secret")
    assert problems(*REMOTE, "generator.remote_api_key_env=KEY_OF_A_TEST") == ()
    assert problems(*REMOTE, STOCK) == ()
    assert problems(REMOTE[0], f"{URLS}=[http://10.0.0.1:8000,https://engine.example/]") == ()


def test_all_failures_come_at_once():
    found = problems(
        "trainer.train_batch_size=200",
        "trainer.policy_mini_batch_size=3",
        "trainer.algorithm.use_kl_in_reward=true",
        f"{MEGATRON}.tensor_model_parallel_size=2",
    )
    assert len(found) == 4


def test_the_reference_layout_does_not_matter_without_a_reference():
    wrong = "trainer.ref.megatron_config.tensor_model_parallel_size=3"
    assert len(problems(wrong)) == 1
    assert problems(wrong, "trainer.algorithm.use_kl_loss=false") == ()
    assert problems(wrong, "trainer.algorithm.kl_loss_coef=0") == ()


def test_an_interleaved_reference_needs_a_multiple_of_its_stages_from_the_policy():
    """It scores the policy's micro-batches; Megatron refuses other numbers in the middle of a step."""
    reference = [
        "trainer.placement.ref_num_gpus_per_node=2",
        "trainer.ref.megatron_config.pipeline_model_parallel_size=2",
    ]
    reference += ["trainer.ref.megatron_config.virtual_pipeline_model_parallel_size=2"]
    (found,) = problems(*reference)
    assert "trainer.ref.megatron_config.virtual_pipeline_model_parallel_size is 2: an interleaved schedule" in found
    assert "a multiple of 2 micro-batches, and the policy's, which it scores, are a multiple of 1" in found
    policy = ["trainer.placement.policy_num_gpus_per_node=4", f"{MEGATRON}.pipeline_model_parallel_size=4"]
    assert problems(*reference, *policy, f"{MEGATRON}.virtual_pipeline_model_parallel_size=2") == ()


def test_one_sample_per_prompt_is_enough_for_estimators_without_groups():
    assert problems("generator.n_samples_per_prompt=1", "trainer.algorithm.advantage_estimator=reinforce++") == ()


def test_missing_models_and_data_name_the_path(folder: Path):
    found = problems(
        "data.train_data=[train.jsonl,gone.parquet,openai/gsm8k:train,notes.txt]",
        "trainer.policy.model.path=./gone",
        files=True,
    )
    assert [problem.split(":")[0] for problem in found] == [
        "data.train_data contains gone.parquet",
        "data.train_data contains notes.txt",
        "trainer.policy.model.path is ./gone",
    ]
    assert problems("data.train_data=[gone.parquet]", "trainer.policy.model.path=./gone", files=False) == ()


def test_data_may_lie_in_the_home_folder_be_compressed_or_far_away(folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", str(folder))
    Path("train.jsonl.gz").touch()
    names = ["'~/train.jsonl'", "train.jsonl.gz", "'s3://bucket/train.parquet'", "'part-*.parquet'"]
    model = "trainer.policy.model.path=Qwen/Qwen3-0.6B"
    assert problems(f"data.train_data=[{','.join(names)}]", model, files=True) == ()
    (found,) = problems("data.train_data=['~/gone.jsonl']", model, files=True)
    assert "~/gone.jsonl: there is no such file" in found


def test_hub_names_pass_and_folders_are_recognised(folder: Path):
    assert problems("data.train_data=[train.jsonl]", "trainer.policy.model.path=Qwen/Qwen3-0.6B", files=True) == ()
    Path("models").mkdir()
    assert [looks_local(p) for p in ("/a", "./a", "~/a", "a/b/c", "models/new")] == [True] * 5
    assert [looks_local(p) for p in ("gpt2", "Qwen/Qwen3-0.6B")] == [False, False]


@pytest.mark.parametrize(
    ("shape", "overrides", "expected"),
    [
        ({"num_attention_heads": 3}, ["tensor_model_parallel_size=2"], "it must divide the model's 3 attention heads"),
        (
            {"num_attention_heads": 6, "num_key_value_heads": 3},
            ["tensor_model_parallel_size=2"],
            "it must divide the model's 3 key-value heads, or be a multiple of them",
        ),
        (
            {"num_hidden_layers": 1},
            ["pipeline_model_parallel_size=2"],
            "is 2 stages: more than the model's 1 layers",
        ),
        (
            {"num_hidden_layers": 3},
            ["pipeline_model_parallel_size=2", "virtual_pipeline_model_parallel_size=2"],
            "x virtual_pipeline_model_parallel_size 2 is 4 stages: more than the model's 3 layers",
        ),
        ({}, ["expert_model_parallel_size=2"], "is 2: the model has no experts"),
        ({"num_local_experts": 3}, ["expert_model_parallel_size=2"], "it must divide the model's 3 experts"),
        (
            {"num_experts": 4, "shared_expert_intermediate_size": 49},
            ["tensor_model_parallel_size=2"],
            "tensor_model_parallel_size is 2: it must divide the model's shared_expert_intermediate_size 49",
        ),
        (
            {"n_routed_experts": 4, "n_shared_experts": 1, "moe_intermediate_size": 49},
            ["tensor_model_parallel_size=2", "expert_tensor_parallel_size=1"],
            "tensor_model_parallel_size is 2: it must divide the model's n_shared_experts x moe_intermediate_size 49",
        ),
        (
            {"n_routed_experts": 4, "first_k_dense_replace": 1, "intermediate_size": 97},
            ["tensor_model_parallel_size=2"],
            "tensor_model_parallel_size is 2: it must divide the model's intermediate_size 97",
        ),
        (
            {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 98},
            ["tensor_model_parallel_size=2", "expert_tensor_parallel_size=4"],
            "expert_tensor_parallel_size is 4: it must divide the model's intermediate_size 98",
        ),
        ({"text_config": {"num_attention_heads": 5}}, ["tensor_model_parallel_size=2"], "5 attention heads"),
    ],
)
def test_a_layout_that_does_not_fit_the_model_is_refused(
    folder: Path, shape: dict[str, object], overrides: list[str], expected: str
):
    found = problems(
        model("model", **shape),
        "data.train_data=[train.jsonl]",
        "trainer.placement.policy_num_gpus_per_node=4",
        "trainer.algorithm.use_kl_loss=false",
        *(f"{MEGATRON}.{override}" for override in overrides),
        files=True,
    )
    assert len(found) == 1
    assert expected in found[0]


@pytest.mark.parametrize(
    "shape",
    [
        {"num_experts": 4, "intermediate_size": 97, "shared_expert_intermediate_size": 0},
        {"n_routed_experts": 4, "first_k_dense_replace": 0, "intermediate_size": 97},
        {"n_routed_experts": 4, "mlp_layer_types": ["sparse"], "intermediate_size": 97},
        {"model_type": "mixtral", "num_local_experts": 4, "intermediate_size": 97},
    ],
)
def test_tensor_parallelism_need_not_divide_a_width_that_no_layer_has(folder: Path, shape: dict[str, object]):
    layout = ["tensor_model_parallel_size=2", "expert_tensor_parallel_size=1"]
    given = [model("model", **shape), "data.train_data=[train.jsonl]", "trainer.placement.policy_num_gpus_per_node=2"]
    given.append("trainer.algorithm.use_kl_loss=false")
    assert problems(*given, *(f"{MEGATRON}.{override}" for override in layout), files=True) == ()


def test_stages_need_not_divide_the_layers(folder: Path):
    layout = [
        model("model", num_hidden_layers=5),
        "data.train_data=[train.jsonl]",
        "trainer.placement.policy_num_gpus_per_node=2",
        "trainer.algorithm.use_kl_loss=false",
        f"{MEGATRON}.pipeline_model_parallel_size=2",
    ]
    assert problems(*layout, files=True) == ()
    kwargs = f"{MEGATRON}.transformer_config_kwargs"
    assert problems(*layout, f"{kwargs}.num_layers_in_first_pipeline_stage=3", files=True) == ()
    (even,) = problems(*layout, f"{kwargs}.pipeline_model_parallel_layout=null", files=True)
    assert "2 stages: they must divide the model's 5 layers" in even


def test_conversations_longer_than_the_models_positions_are_refused(folder: Path):
    data = "data.train_data=[train.jsonl]"
    (found,) = problems(model("model", max_position_embeddings=1535), data, files=True)
    assert "is 1536 tokens: more than the model's 1535 positions" in found
    assert problems(model("other", max_position_embeddings=1536), data, files=True) == ()


def test_an_engine_layout_that_does_not_fit_the_model_is_refused(folder: Path):
    tp = "generator.inference_engine_tensor_parallel_size=3"
    (found,) = problems(model("model"), tp, "data.train_data=[train.jsonl]", files=True)
    assert found.startswith("generator.inference_engine_tensor_parallel_size is 3: it must divide the model's 4")


@pytest.mark.parametrize(("text", "expected"), [("[1]", "holds a list, not an object"), ("{", "cannot be read")])
def test_a_config_json_that_is_not_an_object_is_refused(folder: Path, text: str, expected: str):
    given = model("model")
    Path("model/config.json").write_text(text)
    (found,) = problems(given, "data.train_data=[train.jsonl]", files=True)
    assert found.startswith("trainer.policy.model.path is model: its config.json ") and expected in found


def test_a_model_without_permission_to_read_it_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch):
    given = model("model")

    def without_permission(allowed: Callable[..., Any]) -> Callable[..., Any]:  # root may read everything
        def refused(path: Path, *arguments: Any, **options: Any) -> Any:
            if path.name == "config.json":
                raise PermissionError(13, "Permission denied", str(path))
            return allowed(path, *arguments, **options)

        return refused

    monkeypatch.setattr(Path, "stat", without_permission(Path.stat))
    monkeypatch.setattr(Path, "open", without_permission(Path.open))
    (found,) = problems(given, "data.train_data=[train.jsonl]", files=True)
    assert "its config.json cannot be read ([Errno 13] Permission denied: 'model/config.json')" in found


def test_a_reference_of_its_own_is_checked_too(folder: Path):
    model("ref", num_hidden_layers=1)
    found = problems(
        model("model"),
        "data.train_data=[train.jsonl]",
        "trainer.ref.model.path=./ref",
        "trainer.placement.ref_num_gpus_per_node=2",
        "trainer.ref.megatron_config.pipeline_model_parallel_size=2",
        files=True,
    )
    assert len(found) == 1
    assert found[0].startswith("trainer.ref.megatron_config.pipeline_model_parallel_size 2 is 2 stages")


def test_packages_that_are_asked_for_and_missing_are_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    found = problems("trainer.logger=wandb", f"{MEGATRON}.transformer_impl=transformer_engine")
    assert list(found) == [
        "trainer.logger contains wandb, which is not installed. Run pip install wandb, or remove it from the list",
        f"{MEGATRON}.transformer_impl is transformer_engine, which is not installed. Use auto or torch",
    ]


def test_transformer_engine_is_refused_for_float32(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: object())
    asked = f"{MEGATRON}.transformer_impl=transformer_engine"
    (found,) = problems(asked, "trainer.bf16=false", "generator.model_dtype=float32")
    assert found.startswith(f"{MEGATRON}.transformer_impl is transformer_engine, which rounds float32")
    assert problems(asked) == ()


def test_checking_is_quick_and_imports_no_engine():
    config = load_config(["+experiment=quickstart"])
    start, imported = time.process_time(), set(sys.modules)
    check(config, num_train_prompts=1000, files=False)
    assert time.process_time() - start < 5
    assert "vllm" not in set(sys.modules) - imported


def test_lora_must_have_something_to_adapt_and_the_adapter_that_is_named(tmp_path: Path):
    lora = "trainer.policy.model.lora"

    def found(*overrides: str) -> str:
        return "; ".join(problems(*overrides, files=True))

    assert "rank is 0: the adapter would not be read. Set rank" in found(f"{lora}.path={tmp_path}")
    assert "no such folder" in found(f"{lora}.rank=8", f"{lora}.path={tmp_path}/none")
    assert "target_modules is ['q_proj'] and" in found(f"{lora}.target_modules=[q_proj]")
    assert "sync is adapter and" in found(f"{lora}.sync=adapter") and "sync" not in found(f"{lora}.rank=8")
    assert "target_modules is empty" in found(f"{lora}.rank=8", f"{lora}.target_modules=[]")


def test_the_reference_of_adapters_is_their_own_base_model():
    (problem,) = problems("trainer.policy.model.lora.rank=8", "trainer.ref.model.path=other")
    assert "Remove trainer.ref.model.path" in problem


COLOCATED = ["trainer.placement.colocate_all=true", "trainer.placement.policy_num_gpus_per_node=4"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([*COLOCATED, "generator.num_inference_engines=2"], "4 policy ranks and .* 2 x .* 1 = 2 engine ranks"),
        (
            [*COLOCATED, "generator.num_inference_engines=4", "trainer.placement.ref_num_gpus_per_node=2"],
            "4 policy ranks and 2 reference ranks",
        ),
        (
            [*COLOCATED, ENGINES, TEACHER, TYPE + "loss", "trainer.placement.teacher_num_gpus_per_node=2"],
            "4 policy ranks and 2 teacher ranks: .* Remove trainer.placement.teacher_num_nodes and teacher_num",
        ),
        ([*COLOCATED, "generator.run_engines_locally=false"], "cannot share devices with the trainer"),
    ],
)
def test_models_that_share_devices_must_fit_on_them(overrides: list[str], expected: str):
    (problem,) = [one for one in problems(*overrides) if "trainer.placement" in one and "remote_inference" not in one]
    assert re.search(expected, problem)


def test_one_engine_over_all_devices_or_one_on_each_may_share_them():
    assert problems(*COLOCATED, "generator.num_inference_engines=4") == ()
    wide = ["generator.inference_engine_tensor_parallel_size=2", "generator.num_inference_engines=2"]
    assert problems(*COLOCATED, *wide, "trainer.placement.release=none") == ()
    assert (
        problems(*COLOCATED[:1], "trainer.placement.ref_num_gpus_per_node=2", "trainer.algorithm.use_kl_loss=false")
        == ()
    )


def test_servers_that_run_already_get_merged_weights():
    (problem,) = problems("trainer.policy.model.lora.rank=8", "trainer.policy.model.lora.sync=adapter", *REMOTE)
    assert "lora.sync=merged" in problem


def test_a_rank_that_engines_cannot_serve_is_refused_before_they_start():
    rank = "trainer.policy.model.lora.rank=513"
    (problem,) = problems(rank, "trainer.policy.model.lora.sync=adapter")
    assert "rank is 513: vLLM has slots up to 512" in problem
    assert problems(rank) == ()


PROFILER = f"{MEGATRON}.torch_profiler_config"
WITHOUT_REFERENCE = ["trainer.algorithm.use_kl_loss=false"]


@pytest.mark.parametrize("key", ["enable", "record_memory"])
def test_profiled_ranks_must_exist(key: str):
    assert problems(f"{PROFILER}.{key}=true", f"{PROFILER}.ranks=[0,7]") == ()
    assert problems(f"{PROFILER}.ranks=[7]") == ()
    (found,) = problems(
        f"{PROFILER}.{key}=true", f"{PROFILER}.ranks=[7]", "trainer.ref.megatron_config.torch_profiler_config.ranks=[0]"
    )
    assert "ranks is [7]: no such rank exists. Name ranks from 0 to 0" in found


def test_snapshots_without_steps_are_those_of_steps_that_run_out_of_memory():
    assert problems(f"{PROFILER}.record_memory=true", f"{PROFILER}.steps=[]") == ()
    assert "steps is empty" in problems(f"{PROFILER}.enable=true", f"{PROFILER}.steps=[]")[0]


GAE = "trainer.algorithm.advantage_estimator=gae"


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([GAE], None),
        ([GAE, "generator.n_samples_per_prompt=1"], None),
        (
            ["trainer.critic.model.path=other/model"],
            "trainer.critic.model.path is other/model and trainer.algorithm.advantage_estimator is grpo, which uses no "
            "critic. Set advantage_estimator=gae, or remove the path",
        ),
        (
            [GAE, "trainer.critic_mini_batch_size=3"],
            "trainer.train_batch_size is 8: not a multiple of trainer.critic_mini_batch_size 3. Set "
            "critic_mini_batch_size to a divisor",
        ),
        (
            [GAE, "trainer.critic.megatron_config.tensor_model_parallel_size=3"],
            "trainer.placement.critic_num_nodes * critic_num_gpus_per_node is 1 ranks: not a multiple of "
            "trainer.critic.megatron_config's tensor 3 x pipeline 1 x context 1 = 3. Add ranks or lower the sizes",
        ),
        (
            [GAE, "trainer.placement.colocate_all=true", "trainer.placement.critic_num_nodes=2"],
            "trainer.placement.colocate_all is true with 1 policy ranks and 2 critic ranks: the numbers must match. "
            "Remove trainer.placement.critic_num_nodes and critic_num_gpus_per_node from the configuration",
        ),
        (
            ["trainer.algorithm.advantage_estimator=tests.support.own_functions:of_entropy"],
            "tests.support.own_functions:of_entropy needs entropy: estimators can only declare values. Remove it",
        ),
    ],
)
def test_a_critic_is_checked_where_the_estimator_reads_values(overrides: list[str], expected: str | None):
    assert problems(*overrides) == (() if expected is None else (expected,))


def test_the_folder_of_a_critic_is_checked(folder: Path):
    policy = model("policy")
    assert any(
        problem.startswith("trainer.critic.model.path is ./critic: there is no such folder")
        for problem in problems(GAE, policy, "trainer.critic.model.path=./critic", files=True)
    )


RESERVED = ["generator.num_inference_engines=2", "generator.eval_num_engines=1", "data.val_data=[some.jsonl]"]
BESIDE = [*RESERVED, "trainer.source=streaming"]


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (RESERVED, "this run has none. Set it to 0, or set trainer.eval"),
        ([*BESIDE, "trainer.eval_interval=-1"], "this run has none. Set it to 0, or set trainer.eval"),
        ([*BESIDE, "trainer.eval_beside_training=false"], "this run has none. Set it to 0, or set trainer.eval"),
        ([*BESIDE, "generator.eval_num_engines=2"], r"at least one of the 2 engine\(s\) of generator.num_inference_"),
        (
            [*BESIDE, "generator.run_engines_locally=false", "generator.remote_inference_engine_urls=[http://a:1]"],
            r"at least one of the 1 engine\(s\) of generator.remote_inference_engine_urls",
        ),
        ([*BESIDE, "trainer.placement.colocate_all=true"], "engines on the trainer's devices stop while it trains"),
        ([*BESIDE, "generator.weight_sync_backend=vllm_nccl"], "only checked on samples of training"),
    ],
)
def test_engines_for_evaluation_that_would_be_idle_or_leave_none_for_training_are_refused(
    overrides: list[str], expected: str
):
    assert any(re.search(expected, problem) for problem in problems(*overrides)), problems(*overrides)


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], None),
        (["generator.pause_mode=abort"], "pause_mode is abort: no running response keeps its KV cache then"),
        (["trainer.placement.colocate_all=true"], "engines release their KV cache before each update"),
        ([*REMOTE, f"{URLS}=[http://h:1]"], "a running server decides this itself"),
        (["generator.engine_init_kwargs.kv_offloading_size=4"], "a cache outside the engine would hold keys"),
    ],
)
def test_kv_caches_that_no_response_could_keep_are_refused(overrides: list[str], expected: str | None):
    found = [each for each in problems("generator.recompute_kv_cache=false", *overrides) if "recompute_kv" in each]
    assert len(found) == (expected is not None) and all(str(expected) in problem for problem in found)


def test_engines_for_evaluation_beside_training_are_accepted():
    assert problems(*BESIDE) == ()


def test_parameters_of_own_functions_are_not_hidden_by_keys_that_have_their_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    (tmp_path / "own_huber.py").write_text(OWN_HUBER)
    monkeypatch.syspath_prepend(tmp_path)

    def problems(function: str, *overrides: str) -> str:
        config = load_config([f"trainer.algorithm.policy_loss_type=own_huber:{function}", *overrides])
        return " ".join(
            algorithm_problems(config.trainer.algorithm.values, config.trainer.algorithm.parameters, PLACES)
        )

    assert problems("free", "+trainer.algorithm.parameters.width=2.5") == ""
    assert "parameters.delta is set: functions get the key trainer.algorithm." in problems(
        "needed", "+trainer.algorithm.parameters.delta=2.5"
    )
    assert "own_huber:with_default has a default for delta: it would get" in problems("with_default")
    assert problems("needed") == ""


@pytest.mark.parametrize("key", ["run_name", "run_dir", "ckpt_path", "export_path", "placement.state_path"])
def test_a_bucket_is_no_folder_to_write(key: str):
    """It would become a local folder named `s3:`, lost with the machine."""
    config = load_config([f"trainer.{key}=abfs://bucket/x", "data.train_data=[x]", "trainer.policy.model.path=x"])
    with pytest.raises(
        ConfigError, match=f"trainer.{key} is abfs://bucket/x: only local or shared folders are written"
    ) as error:
        check(config, None, files=False)
    assert str(error.value).count("abfs://") == 1, "not again for the folders in that of the run"
