"""Secrets are found by name at any depth, and their values appear nowhere in what a run writes."""

from __future__ import annotations

import io
import json
import logging
import stat
import sys
from pathlib import Path

import pytest
from rich.console import Console

from skyrl_train.config import ConfigError, load_config, main_config, to_yaml
from skyrl_train.config.program import secrets_in
from skyrl_train.config.redaction import Secrets, hidden_in_logs, is_masked, is_secret_name, secrets_of
from skyrl_train.config.rl import RL
from skyrl_train.config.schema import key_types, rules
from skyrl_train.config.sft import SFT
from skyrl_train.config.values import SecretText
from skyrl_train.entrypoints.ending import print_error
from skyrl_train.tracking.changes import changed_values
from skyrl_train.tracking.run_dir import create_run_dir

HTTP_KEY, SEARCH_KEY, HUB_TOKEN, PASSWORD = "comma, and blank's", "search-key-1", "hf_0123456789", "pass-word-2"
CHANGES = [
    f'generator.http_api_key="{HTTP_KEY}"',
    f"environment.skyrl_gym.env_kwargs.search.api_key={SEARCH_KEY}",
    f"environment.skyrl_gym.env_kwargs.search.url='https://user:{PASSWORD}@example.org/?key={SEARCH_KEY}'",
    f"generator.engine_init_kwargs={{hf_token: {HUB_TOKEN}, block_size: 32}}",
    f"trainer.project_name=project-{HUB_TOKEN}",
]


SECRET_NAMES = (
    "api_key http_api_key generator.engine_init_kwargs.hf_token apiKey OPENAI_API_KEY api_keys AWS_SECRET_ACCESS_KEY "
    "password db_passwd client_secret credentials Authorization key token auth_tokens private-key API_KEY_2 "
    "smtp_pass github_pat jwt serper_key db_creds"
)
OTHER_NAMES = (
    "tokenizer max_tokens eos_token pad_token_id key_value num_image_tokens prompt_key monkey remote_api_key_env PWD "
    "max_num_batched_tokens tokens_per_second author keys_per_row kv_cache_memory_gb PYTHONHASHSEED "
    "ground_truth_key solution_key num_keys think_token tool_call_token compass"
)


@pytest.mark.parametrize("name", SECRET_NAMES.split())
def test_a_secret_is_known_by_its_name(name: str):
    assert is_secret_name(name)


@pytest.mark.parametrize("name", OTHER_NAMES.split())
def test_a_name_that_only_resembles_a_secrets_is_none(name: str):
    assert not is_secret_name(name)


def test_no_key_of_the_base_configurations_is_masked_but_those_declared_secret():
    for program in (RL, SFT):
        for key, kind in key_types(program.schema).items():
            assert is_secret_name(key) == any(rule in rules(SecretText) for rule in rules(kind)), key


@pytest.mark.parametrize(
    ("argument", "written"),
    [
        ("generator.http_api_key=xyzzy", "generator.http_api_key=***"),
        ("++generator.http_api_key='a,b c'", "++generator.http_api_key=***"),
        ("generator.http_api_key=a b", "generator.http_api_key=***"),
        ("generator={http_api_key: 'x,y z', max_turns: 2}", "generator={http_api_key: ***, max_turns: 2}"),
        ("generator={http_api_key: ${oc.env:KEY}, a: null}", "generator={http_api_key: ${oc.env:KEY}, a: null}"),
        ("generator={http_api_key: x y, 'z}", "generator=***"),
        (
            "environment.skyrl_gym.env_kwargs.search={api_keys: [a, b]}",
            "environment.skyrl_gym.env_kwargs.search={api_keys: ***}",
        ),
        ("generator.http_api_key=${oc.env:MY_KEY}", "generator.http_api_key=${oc.env:MY_KEY}"),
        ("generator.http_api_key=null", "generator.http_api_key=null"),
        ("a.urls=[http://me:pass@host:1/v1]", "a.urls=[http://***@host:1/v1]"),
        ("a.url=http://h/find?x=1&api_key=xyzzy#top", "a.url=http://h/find?x=1&api_key=***#top"),
        ("a.url='http://h/?api_key=${oc.env:KEY}&page=2'", "a.url='http://h/?api_key=${oc.env:KEY}&page=2'"),
        ("a.db='Server=h;Password=xyzzy;Port=1'", "a.db='Server=h;Password=***;Port=1'"),
        ("a.headers=['X-Api-Key: xyzzy', 'Accept: text/html']", "a.headers=[X-Api-Key: ***, Accept: text/html]"),
        ("trainer.seed=3", "trainer.seed=3"),
    ],
)
def test_an_argument_is_written_without_the_secrets_that_it_holds(argument: str, written: str):
    assert Secrets().argument(argument) == written


def test_a_secret_inside_a_text_is_masked_there_and_elsewhere():
    texts = ["http://h/?a=1&token=query-123", "Password=conn-1234;Server=h", "authorization: Bearer head-1234"]
    secrets = secrets_of({"texts": texts}, {})
    masked = ["http://h/?a=1&token=***", "Password=***;Server=h", "authorization: ***"]
    assert secrets.plain({"texts": texts}) == {"texts": masked}
    assert secrets.text("sent query-123, conn-1234 and head-1234") == "sent ***, *** and ***"


@pytest.mark.parametrize(
    "text",
    ["http://h/?page=2&max_tokens=5", "a=1;b=2", "Key: think first", "Token:{prompt}", "Answer: 4", "what is key=4?"],
)
def test_a_text_without_a_secret_stays(text: str):
    assert Secrets().text(text) == text and secrets_of({"a": text}, {}) == Secrets()


def test_no_file_of_a_run_has_a_secret_and_others_cannot_read_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["program", *CHANGES, f"trainer.run_name=of-{SEARCH_KEY}"])
    config = load_config(CHANGES)
    assert config.generator.http_api_key == HTTP_KEY
    text = to_yaml(config)
    run = create_run_dir(tmp_path / "run", "r", text, changed_values(text, RL.base_yaml()), secrets_in(config))
    for file in (run.config, run.path / "run.json"):
        for secret in (HTTP_KEY, "and blank", SEARCH_KEY, HUB_TOKEN, PASSWORD):
            assert secret not in file.read_text()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(run.logs.stat().st_mode) == 0o700
    record = json.loads((run.path / "run.json").read_text())
    assert record["command"][-1] == "trainer.run_name=of-***"
    assert record["changes"]["generator.engine_init_kwargs.hf_token"] == "***"
    assert record["changes"]["generator.engine_init_kwargs.block_size"] == 32
    run.finish("finished")
    assert stat.S_IMODE((run.path / "run.json").stat().st_mode) == 0o600


def test_a_file_that_others_could_read_is_closed_to_them(tmp_path: Path):
    (tmp_path / "run" / "logs").mkdir(parents=True)
    (tmp_path / "run" / ".lock").touch()
    (tmp_path / "run" / "config.yaml").touch(mode=0o644)
    run = create_run_dir(tmp_path / "run", "r", "a: 1\n", {})
    assert stat.S_IMODE(run.config.stat().st_mode) == 0o600


@pytest.mark.parametrize("change", CHANGES[:4])
def test_a_written_configuration_asks_for_its_secrets_again(tmp_path: Path, change: str):
    (tmp_path / "config.yaml").write_text(to_yaml(load_config([change])))
    with pytest.raises(ConfigError, match="the mask of a secret in saved configurations. Set the real value"):
        main_config(["--config-file", str(tmp_path / "config.yaml")])


@pytest.mark.parametrize(
    "change",
    [
        "generator.http_api_key=one-part,other-part",
        "generator.http_api_key='one-part",
        "generator={http_api_key: [one-part}",
    ],
)
def test_an_error_about_a_command_line_does_not_quote_its_secrets(change: str):
    with pytest.raises(ConfigError) as error:
        load_config([change])
    assert "one-part" not in str(error.value)


def test_an_error_about_a_wrong_type_does_not_quote_secrets_inside_the_value():
    with pytest.raises(ConfigError) as error:
        load_config(["generator.num_inference_engines={api_key: one-part}"])
    assert "one-part" not in str(error.value) and "***" in str(error.value)


def test_short_values_are_masked_between_words_and_not_within_them():
    secrets = secrets_of({"api_key": "test", "other": {"token": "true"}, "key": "a"}, {})
    assert secrets.text("the latest test is a true one") == "the latest *** is a true one"


def test_values_of_the_environment_are_masked_by_the_names_of_variables():
    environment = {"WANDB_API_KEY": "0123456789", "CREDS": "named-by-a-key", "HOME": "/home/somebody", "A_KEY": "short"}
    secrets = secrets_of({"remote_api_key_env": "CREDS"}, environment)
    assert secrets.text("0123456789 named-by-a-key /home/somebody short") == "*** *** /home/somebody short"


def test_log_lines_and_errors_are_masked(caplog: pytest.LogCaptureFixture):
    secrets, log = secrets_of({"api_key": "the-secret"}, {}), logging.getLogger("skyrl_train.test")
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    try:
        with hidden_in_logs(secrets):
            try:
                raise ValueError("refused the-secret")
            except ValueError:
                log.exception("sent %s", "the-secret")
    finally:
        logging.getLogger().removeHandler(handler)
    assert "sent ***" in stream.getvalue() and "refused ***" in stream.getvalue()
    assert "the-secret" not in stream.getvalue()
    console = Console(file=io.StringIO())
    print_error("refused the-secret", console, secrets)
    assert console.file.getvalue() == "error: refused ***\n"  # type: ignore[attr-defined]


def test_a_common_word_below_a_doubtful_name_is_masked_there_alone():
    values = {"board_key": "solution", "serper_key": "a1b2c3d4e5", "path": "/models/solution-7b"}
    secrets = secrets_of(values, {})
    assert secrets.plain(values) == {"board_key": "***", "serper_key": "***", "path": "/models/solution-7b"}
    assert secrets.text("the key is a1b2c3d4e5") == "the key is ***"


def test_the_token_of_an_authorization_header_is_masked_without_its_scheme():
    secrets = secrets_of({"headers": {"Authorization": "Bearer sk-abc-def"}}, {})
    assert secrets.text("refused sk-abc-def") == "refused ***"


def test_a_password_with_an_at_sign_is_masked_to_its_end():
    assert secrets_of({}, {}).text("postgres://u:p@ss@host/db") == "postgres://***@host/db"


def test_a_value_with_a_mask_inside_is_not_taken_as_a_value():
    with pytest.raises(ConfigError, match="mask of a secret"):
        load_config(["trainer.project_name=/models/***-7b"])
    values = "/models/***_v2", "tok***", "http://***@h/?a=***&b=1", "one\npassword=***", "/a/***/b/***"
    assert all(is_masked(value) for value in values)


@pytest.mark.parametrize("prompt", ["Mark it as ***bold***.", "Answer.\n***\nThink first.", "Rate it from * to *****."])
def test_asterisks_in_prose_are_no_mask(prompt: str):
    assert load_config([f"data.system_prompt='{prompt}'"]).data.system_prompt == prompt
