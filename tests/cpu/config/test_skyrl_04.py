"""Command lines of skyrl_train 0.4: all 79 of its scripts, each of its keys, and what a user reads."""

from __future__ import annotations

import json
import logging
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.checks.rl import check
from skyrl_train.config import Config, ConfigError, load_config
from skyrl_train.config.overrides import is_known, literal, parse
from skyrl_train.config.schema import key_types
from skyrl_train.config.sft import load_sft_config
from skyrl_train.config.skyrl_04.conversions import CONVERSIONS
from skyrl_train.config.skyrl_04.table import Case, expanded, filled, table
from skyrl_train.config.skyrl_04.translate import translate
from skyrl_train.entrypoints.main_base import main

DATA = json.loads((Path(__file__).parents[2] / "data/skyrl_04.json").read_text())
COMMANDS: dict[str, list[str]] = {name: shlex.split(each["arguments"]) for name, each in DATA["commands"].items()}
CANNOT_BE_HAD = {
    "examples/algorithms/custom_advantage_estimator/run_custom_adv_est.sh": "or your own module:attribute",
    "examples/livecodebench/run_lcb.sh": "top_p is 0.95: the engine would sample from some of the tokens",
    "examples/lora/run_qwen2_5_0.5b_gsm8k_ppo_lora.sh": "trainer.critic.model.lora.rank=32: a critic has no adapters",
    "examples/remote_inference_engine/run_remote.sh": "top_p is 0.95: the engine would sample from some of the tokens",
    "examples/step_wise/run_skyrl_sql_step_wise.sh": "top_p is 0.95: the engine would sample",
    "examples/step_wise/run_skyrl_sql_step_wise_qwen3.sh": "top_p is 0.95: the engine would sample",
    "examples/terminal_bench/run_codecontest.sh": "the group belongs to 0.4's terminal-bench example",
    "examples/terminal_bench/run_otagent.sh": "the group belongs to 0.4's terminal-bench example",
    "examples/terminal_bench/run_tbench_gen.sh": "the group belongs to 0.4's terminal-bench example",
    "examples/text_to_sql/run_skyrl_sql.sh": "top_p is 0.95: the engine would sample",
    "examples/text_to_sql/run_skyrl_sql_conversation_format.sh": "top_p is 0.95: the engine would sample",
    "examples/text_to_sql/run_skyrl_sql_megatron_lora.sh": "top_p is 0.95: the engine would sample",
    "examples/text_to_sql/run_sql_fsdp.sh": "top_p is 0.95: the engine would sample",
    "examples/text_to_sql/run_sql_fsdp_2node.sh": "reward_num_nodes=2: there is no reward model",
    "integrations/openenv/run_openenv.sh": "top_p is 0.95: the engine would sample from some of the tokens",
}
KNOWN = key_types(Config)
MEGATRON = "trainer.policy.megatron_config"
OFF_POLICY = "trainer.algorithm.off_policy_correction"


def problems(arguments: list[str]) -> tuple[str, ...]:
    """Of the configuration and its checks that need no files."""
    try:
        check(load_config(arguments), None, files=False)
    except ConfigError as error:
        return error.problems
    return ()


def told(caplog: pytest.LogCaptureFixture, arguments: list[str]) -> tuple[Config, str]:
    """The configuration, and the one warning about it."""
    caplog.clear()
    config = load_config(arguments)
    said = [record.getMessage() for record in caplog.records if record.name.endswith("notice")]
    assert len(said) <= 1
    return config, "".join(said)


def test_the_data_has_every_script_and_every_key_of_the_release():
    assert len(COMMANDS) == 79 and len(DATA["defaults"]) == 240


def test_sixty_four_of_the_seventy_nine_command_lines_pass_every_check_and_the_others_say_why():
    found = {name: said for name, arguments in COMMANDS.items() if (said := problems(arguments))}
    assert len(COMMANDS) - len(found) == 64
    assert found.keys() == CANNOT_BE_HAD.keys()
    for name, sentence in CANNOT_BE_HAD.items():
        assert sentence in "\n".join(found[name])
        assert not [said for said in found[name] if said.startswith("unknown key")]


def test_every_key_of_the_release_is_known_or_translated():
    for key in DATA["defaults"]:
        assert is_known(key, KNOWN) or table().find(key) is not None, key


def test_all_defaults_of_the_release_together_are_a_configuration():
    """Refused one by one once: stop=null, save_path=null, weight_sync_backend=nccl, resume_mode=none."""
    own_folder = ("data.", "trainer.ckpt_path", "trainer.export_path")
    given = {key: value for key, value in DATA["defaults"].items() if not key.startswith(own_folder)}
    given |= {"generator.remote_inference_engine_urls": []}  # 0.4 does not read it with engines of its own
    given |= {"trainer.resume_mode": "none"}
    assert problems([f"{key}={literal(value)}" for key, value in given.items()]) == ()


def cases() -> Iterator[tuple[str, tuple[str, ...], Case, bool]]:
    """Key, parts, case, and whether it is the last of its key."""
    for rules in table().sections.values():
        for rule in rules:
            for name in rule.keys:
                for key, parts in expanded(name.replace("<env>", "search").replace("<name>", "limit")):
                    parts = parts or ("search", "limit")
                    for case in rule.cases:
                        yield key, parts, case, case is rule.cases[-1]


def test_every_rule_leads_to_keys_that_exist_and_leaves_no_value_of_an_unknown_key_open():
    for key, parts, case, is_last in cases():
        for new in case.to:
            assert is_known(filled(new, parts), KNOWN), f"{key} -> {new}"
        for value in case.to.values():
            assert not str(value).startswith("$") or str(value).startswith("${") or value in CONVERSIONS, value
        for other in case.when:
            assert other in DATA["defaults"] or other in KNOWN, other
        if is_last and not is_known(key, KNOWN):
            assert case.values is None and case.only is None and not case.when, key
    for meaning in table().meanings:
        assert (meaning.when.keys() | meaning.unless.keys()) <= KNOWN.keys()
    assert table().defaults.keys() <= KNOWN.keys()


@pytest.mark.parametrize(
    ("arguments", "key", "expected"),
    [
        (["trainer.policy.sequence_parallel_size=2"], "trainer.policy.megatron_config.context_parallel_size", 2),
        (["trainer.ref.sequence_parallel_size=2"], "trainer.ref.megatron_config.context_parallel_size", 2),
        (["trainer.gradient_checkpointing=true"], "trainer.policy.megatron_config.recompute_granularity", "full"),
        (
            ["trainer.policy.megatron_config.transformer_config_kwargs={recompute_granularity: selective, foo: 1}"],
            "trainer.policy.megatron_config.recompute_granularity",
            "selective",
        ),
        (["trainer.policy.record_memory=true"], f"{MEGATRON}.torch_profiler_config.record_memory", True),
        (["trainer.resume_mode=none"], "trainer.resume_mode", None),
        (["trainer.logger=wandb"], "trainer.logger", ("wandb",)),
        (["trainer.eval_interval=0", "trainer.strategy=fsdp"], "trainer.eval_interval", -1),
        (["data.train_data=[openai/gsm8k]", "trainer.strategy=fsdp"], "data.train_data", ("openai/gsm8k:train",)),
        (["trainer.algorithm.use_tis=true"], "trainer.algorithm.corrections", ("token_tis",)),
        (
            [f"{OFF_POLICY}.tis_ratio_type=token", f"{OFF_POLICY}.sequence_mask_metric=product"],
            "trainer.algorithm.corrections",
            ("token_tis", "product_mask"),
        ),
        (
            [
                "trainer.algorithm.off_policy_correction.tis_ratio_type=sequence",
                "trainer.algorithm.off_policy_correction.sequence_mask_metric=geometric",
                "trainer.algorithm.off_policy_correction.outlier_token_is_threshold_high=9",
            ],
            "trainer.algorithm.corrections",
            ("sequence_tis", "geometric_mask", "outlier_mask"),
        ),
        *(
            (
                [
                    f"{OFF_POLICY}.tis_ratio_type=token",
                    f"{OFF_POLICY}.outlier_token_is_threshold_low=0.01",
                    f"{OFF_POLICY}.outlier_token_is_threshold_high=10",
                ],
                f"{OFF_POLICY}.outlier_token_is_threshold_{side}",
                threshold,
            )
            for side, threshold in (("low", 0.01), ("high", 10.0))
        ),
        (
            ["trainer.algorithm.use_tis=true", "trainer.algorithm.tis_imp_ratio_cap=3.5"],
            "trainer.algorithm.off_policy_correction.token_tis_ratio_clip_high",
            3.5,
        ),
        (["+trainer.algorithm.overlong_buffer.len=9"], "trainer.algorithm.overlong_buffer.len", 9),
        (["generator.weight_sync_backend=nccl"], "generator.weight_sync_backend", "auto"),
        (["generator.sampling_params.stop=null"], "generator.sampling_params.stop", ()),
        (['generator.sampling_params.stop=["</a>", "b"]'], "generator.sampling_params.stop", ("</a>", "b")),
        (
            ["generator.remote_inference_engine_urls=['10.0.0.1:8001','http://b:1']"],
            "generator.remote_inference_engine_urls",
            ("http://10.0.0.1:8001", "http://b:1"),
        ),
        (["generator.external_server_urls=[a:1]"], "generator.run_engines_locally", False),
        (
            ["generator.num_inference_engines=2", "generator.inference_engine_data_parallel_size=3"],
            "generator.num_inference_engines",
            6,
        ),
        (["trainer.policy.model.lora.target_modules=linear_qkv"], "trainer.policy.model.lora.target_modules",
         ("q_proj", "k_proj", "v_proj")),
        (
            ["trainer.fully_async.max_staleness_steps=2", "trainer.placement.colocate_all=false"],
            "trainer.max_staleness",
            2,
        ),
        (["trainer.fully_async.max_staleness_steps=2"], "trainer.source", "on_policy"),
        (["trainer.strategy=fsdp", "trainer.run_name="], "trainer.run_name", "test_run"),
        (["environment.skyrl_gym.max_env_workers=0"], "environment.skyrl_gym.max_env_workers", 1),
        (["trainer.policy.sequence_parallel_size=4", "trainer.policy.sequence_parallel_size=2"],
         "trainer.policy.megatron_config.context_parallel_size", 2),
    ],
)  # fmt: skip
def test_a_key_or_value_of_the_release_means_here(arguments: list[str], key: str, expected: Any):
    found: Any = load_config(arguments)
    for name in key.split("."):
        found = getattr(found, name)
    assert found == expected


def test_settings_of_an_environment_reach_it_with_the_defaults_of_the_release():
    config = load_config(["environment.skyrl_gym.search.topk=5", "+environment.skyrl_gym.mine.limit=7"])
    kwargs = config.environment.skyrl_gym.env_kwargs
    assert kwargs["search"] == {
        "log_requests": False, "search_url": "http://127.0.0.1:8000/retrieve", "topk": 5, "timeout": 30,
    }  # fmt: skip
    assert kwargs["mine"] == {"limit": 7}
    assert kwargs["text2sql"] == {"db_path": "/home/ray/default/sql_data"}
    assert load_config(["environment.skyrl_gym={search: {topk: 5}}"]).environment.skyrl_gym.env_kwargs == {
        name: value for name, value in kwargs.items() if name != "mine"
    }


def test_settings_of_an_environment_named_by_its_class_are_read_from_the_command_line():
    config = load_config(
        [
            "environment.skyrl_gym.env_kwargs.my.envs:Env.limit=5",
            "+environment.skyrl_gym.env_kwargs.my.envs:Env.a.b=[x]",
        ]
    )
    assert config.environment.skyrl_gym.env_kwargs["my.envs:Env"] == {"limit": 5, "a": {"b": ["x"]}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["trainer.strategy=deepspeed"], "trainer.strategy=deepspeed: models are trained with Megatron. Remove the"),
        (["trainer.algorithm.use_tis=maybe"], "trainer.algorithm.use_tis=maybe: it must be true or false"),
        (["generator.backend=sglang"], "generator.backend=sglang: engines are vLLM's"),
        (["generator.sampling_params.logprobs=5"], "the logprob of each sampled token is kept, and no other"),
        (
            ["trainer.policy.sequence_parallel_size=2", "trainer.policy.megatron_config.context_parallel_size=4"],
            f"trainer.policy.sequence_parallel_size=2 is {MEGATRON}.context_parallel_size=2 here, but "
            f"{MEGATRON}.context_parallel_size=4 is given too. Remove one of them",
        ),
        (
            ["trainer.algorithm.use_tis=true", "trainer.algorithm.corrections=[icepop]"],
            "trainer.algorithm.use_tis=true is trainer.algorithm.corrections=['token_tis'] here, but",
        ),
        (
            ["trainer.policy.sequence_parallel_size=0"],
            "context_parallel_size is 0: it must be at least 1 (from trainer.policy.sequence_parallel_size=0 on the",
        ),
        (
            ["trainer.policy.sequence_parallel_size=two"],
            "is 'two' (str): expected int (from trainer.policy.sequence_parallel_size=two on the command line)",
        ),
    ],
)  # fmt: skip
def test_what_cannot_be_had_or_contradicts_itself_names_the_key_that_was_written(arguments: list[str], expected: str):
    assert expected in "\n".join(problems(arguments))


def test_a_check_of_the_whole_configuration_names_the_key_that_was_written(capsys: pytest.CaptureFixture[str]):
    layout = ["trainer.policy.sequence_parallel_size=3", "trainer.placement.policy_num_gpus_per_node=8"]
    assert main([*layout, "trainer.prepare=skyrl_train.tasks.quickstart:prepare"]) == 2
    said = capsys.readouterr().out
    assert "context 3 = 3. Add ranks or lower the sizes (trainer.policy.sequence_parallel_size=3 is" in said
    assert "trainer.policy.megatron_config.context_parallel_size here)" in said


def test_one_warning_says_what_was_mapped_what_is_ignored_and_what_differs(caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING)
    arguments = ["trainer.strategy=fsdp2", "generator.weight_sync_backend=nccl", "trainer.eval_interval=-1"]
    _, said = told(caplog, [*arguments, "generator.batched=true", "generator.async_engine=true"])
    assert "generator.weight_sync_backend=nccl -> generator.weight_sync_backend=auto" in said
    assert "trainer.strategy=fsdp2: Megatron trains" in said
    assert "generator.batched=true, generator.async_engine=true: requests are always asynchronous" in said
    assert "use_kl_loss: the KL term acts here" in said and "eval_interval=-1: evaluation" in said
    assert "trainer.max_ckpts_to_keep=1 (0.4: -1), trainer.resume_mode=null (0.4: latest)" in said
    assert "sequence_mean" not in said and "cispo" not in said
    _, said = told(caplog, [*arguments, "trainer.max_ckpts_to_keep=1", "trainer.algorithm.use_kl_loss=false"])
    assert "max_ckpts_to_keep" not in said and "KL" not in said
    assert told(caplog, ["trainer.seed=3", "+experiment=quickstart"])[1] == ""
    assert told(caplog, ["environment.skyrl_gym.search.api_key=xyzzy"])[1].count("api_key=***") == 2


def test_a_strict_configuration_refuses_every_translation_and_says_what_to_write():
    strict = "trainer.strict_config=true"
    with pytest.raises(ConfigError) as caught:
        load_config([strict, "trainer.policy.sequence_parallel_size=2", "generator.batched=true"])
    assert caught.value.problems == (
        "trainer.policy.sequence_parallel_size=2 is of skyrl_train 0.4, and trainer.strict_config is true. Write "
        "trainer.policy.megatron_config.context_parallel_size=2",
        "generator.batched=true is of skyrl_train 0.4 and has no effect here, and trainer.strict_config is true. "
        "Remove it",
    )
    assert load_config([strict, "+experiment=quickstart"]).trainer.strict_config


def test_a_translation_depends_on_the_chosen_experiment_which_it_overrides(tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    values = "trainer: {max_staleness: 1, train_batch_size: 8}\ngenerator: {num_inference_engines: 4}\n"
    (tmp_path / "experiment/four.yaml").write_text(f"# @package _global_\n{values}")
    asynchronous = ["trainer.placement.colocate_all=false", "trainer.fully_async.max_staleness_steps=3"]
    asynchronous.append("trainer.fully_async.num_parallel_generation_workers=32")
    config = load_config(
        ["+experiment=four", "generator.inference_engine_data_parallel_size=2", *asynchronous], folders=[tmp_path]
    )
    assert config.generator.num_inference_engines == 8
    assert (config.trainer.max_staleness, config.trainer.pipeline_depth) == (3, 3)


def test_keys_of_the_release_in_a_file_or_in_fine_tuning_say_what_they_are_here(tmp_path: Path):
    (tmp_path / "experiment").mkdir()
    text = "# @package _global_\ntrainer: {strategy: fsdp2, policy: {sequence_parallel_size: 2}}\n"
    (tmp_path / "experiment/old.yaml").write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_config(["+experiment=old"], folders=[tmp_path])
    assert "Here it is trainer.policy.megatron_config.context_parallel_size (in" in str(caught.value)
    with pytest.raises(ConfigError, match="trainer.use_sample_packing: a key of skyrl_train 0.4 without effect here"):
        load_sft_config(["trainer.use_sample_packing=true"])


def test_a_misspelt_key_of_this_project_is_no_key_of_the_release():
    with pytest.raises(ConfigError, match=r"unknown key environment\.skyrl_gym\.env_kwarg"):
        load_config(["environment.skyrl_gym.env_kwarg.search.topk=5"])


def test_no_key_of_the_release_is_taken_for_a_misspelling_of_another():
    for key in DATA["defaults"]:
        if not is_known(key, KNOWN):
            with pytest.raises(ConfigError) as caught:
                load_sft_config([f"{key}=1"])
            assert "did you mean" not in str(caught.value), key
    assert "did you mean" not in "".join(problems(["trainer.algorithm.policy_loss_type=gsp_policy"]))


def test_the_order_of_the_command_line_stays_and_secrets_are_not_shown():
    given = ["trainer.seed=1", "trainer.policy.sequence_parallel_size=2", "trainer.seed=2", "+experiment=quickstart"]
    lines, translation = translate([parse(text) for text in given], Config)
    assert [line.key_or_group for line in lines] == [
        "trainer.seed", "trainer.policy.megatron_config.context_parallel_size", "trainer.seed", "experiment",
    ]  # fmt: skip
    assert translation.is_old and load_config(given).trainer.seed == 2
