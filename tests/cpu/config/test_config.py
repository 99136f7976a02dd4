"""The configuration: one source of values, strict conversion, and messages that name the place and the cure."""

from __future__ import annotations

import dataclasses
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from skyrl_train.algorithms.tables import LOSSES
from skyrl_train.config import Config, ConfigError, config_dir, load_config, main_config, to_yaml
from skyrl_train.config.rl import VERIFY, VerifyLayoutConfig
from skyrl_train.config.schema import key_types
from skyrl_train.config.sft import SFT, SftConfig, load_sft_config


def message(argv: list[str]) -> str:
    with pytest.raises(ConfigError) as caught:
        main_config(argv)
    return str(caught.value)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty folder of a user, as the current one."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def experiment(folder: Path, name: str, body: str, first_line: str = "# @package _global_") -> Path:
    path = folder / "experiment" / f"{name}.yaml"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{first_line}\n{body}\n")
    return path


def in_new_process(*argv: str) -> str:
    """Standard output of a Python that imports this checkout."""
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[3])}
    output = subprocess.run(
        [sys.executable, *argv], stdout=subprocess.PIPE, text=True, check=True, timeout=60, env=environment
    )
    return output.stdout.strip()


def yaml_keys(values: dict, kinds: dict, prefix: str = "") -> list[str]:
    found = []
    for name, value in values.items():
        found.append(prefix + name)
        if dataclasses.is_dataclass(kinds.get(prefix + name)):
            found += yaml_keys(value, kinds, f"{prefix}{name}.")
    return found


def test_base_yaml_and_dataclasses_have_the_same_keys():
    base = yaml.safe_load(Path(config_dir, "ppo_base_config.yaml").read_text())
    kinds = key_types(Config)
    assert sorted(yaml_keys(base, kinds)) == sorted(kinds)


def test_no_field_has_a_default():
    sections = [Config, *(kind for kind in key_types(Config).values() if dataclasses.is_dataclass(kind))]
    fields = [f for section in sections for f in dataclasses.fields(section)]
    assert len(fields) > 90
    assert all(f.default is dataclasses.MISSING and f.default_factory is dataclasses.MISSING for f in fields)


def test_values_of_the_base_arrive_with_their_types():
    config = load_config([])
    assert config.trainer.policy.optimizer_config.adam_betas == (0.9, 0.999)
    assert config.trainer.logger == ("console", "jsonl", "tensorboard")
    assert config.trainer.run_dir == "runs/test_run"
    assert config.generator.model_dtype == "bfloat16"
    assert config.generator.kv_cache_memory_gb is None
    assert config.generator.max_input_length == 512
    assert config.trainer.ref.megatron_config == config.trainer.policy.megatron_config


def test_overrides_win_over_the_experiment_and_the_experiment_over_the_base():
    config = load_config(["+experiment=quickstart", "trainer.train_batch_size=256", "trainer.run_name=mine"])
    assert config.trainer.train_batch_size == 256
    assert config.trainer.run_dir == "runs/mine"
    assert config.trainer.policy_mini_batch_size == 64
    assert config.trainer.policy.megatron_config.pipeline_model_parallel_size == 2
    assert config.trainer.policy.optimizer_config.adam_betas == (0.9, 0.95)
    assert config.trainer.policy.optimizer_config.max_grad_norm == 1.0
    assert config.generator.model_dtype == "float32"


def test_an_int_is_a_float_and_one_value_a_list_of_one():
    config = load_config(["trainer.timeout_s=3", "trainer.logger=wandb"])
    assert config.trainer.timeout_s == 3.0 and type(config.trainer.timeout_s) is float
    assert config.trainer.logger == ("wandb",)


def test_free_form_mappings_take_new_keys_with_or_without_a_plus():
    config = load_config(["generator.engine_init_kwargs.foo=1", "+generator.engine_init_kwargs.bar.baz=x"])
    assert config.generator.engine_init_kwargs == {"foo": 1, "bar": {"baz": "x"}}
    assert load_config(["generator.engine_init_kwargs={foo: 1}"]).generator.engine_init_kwargs == {"foo": 1}


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.polcy.model.path=x", "unknown key trainer.polcy.model.path: did you mean trainer.policy.model.path?"),
        ("+trainer.sed=1", "unknown key trainer.sed: did you mean trainer.seed?"),
        ("trainer.lr=1", "unknown key trainer.lr: did you mean trainer.policy.optimizer_config.lr?"),
        ("trainer.train_batchsize=1", "unknown key trainer.train_batchsize: did you mean trainer.train_batch_size?"),
        (
            "trainer.policy.model={pth: x}",
            "unknown key trainer.policy.model.pth: did you mean trainer.policy.model.path?",
        ),
        ("generator.zzz=1", "unknown key generator.zzz: generator has "),
        (
            "trainer.micro_train_batch_size=4",
            "unknown key trainer.micro_train_batch_size: trainer has train_batch_size, ",
        ),
        (
            "trainer.test_batch_size=4",
            "unknown key trainer.test_batch_size: trainer has eval_batch_size, train_batch_size, ",
        ),
        (
            "trainer.algorithm.eps_clip=1",
            "unknown key trainer.algorithm.eps_clip: trainer.algorithm has eps_clip_low, ",
        ),
        ("generator.num_engines=2", "unknown key generator.num_engines: generator has eval_num_engines, "),
        ("environment.reward_func=a", "unknown key environment.reward_func: did you mean environment.reward_fn?"),
    ],
)
def test_a_misspelt_key_on_the_command_line_is_one_sentence_with_the_nearest_key(override: str, expected: str):
    text = message([override])
    assert text.startswith(expected)
    assert text.endswith("(on the command line)")
    assert "\n" not in text and "struct" not in text


def test_two_experiments_are_combined_in_one_list():
    text = message(["+experiment=quickstart", "+experiment=ppo"])
    assert text.startswith("+experiment is given 2 times.") and text.endswith("'+experiment=[quickstart,ppo]'")
    config = load_config(["+experiment=[quickstart,ppo]"])
    assert config.trainer.algorithm.advantage_estimator == "gae"


def test_a_configuration_of_another_program_is_named_with_its_command(project: Path):
    (project / "fine_tuning.yaml").write_text(to_yaml(load_sft_config()))
    text = message(["--config-file", "fine_tuning.yaml"])
    assert text.startswith("fine_tuning.yaml is a configuration of another program: this one has no data.max_length")
    assert text.endswith("main_sft --config-file fine_tuning.yaml")


def test_a_misspelt_key_in_an_experiment_file_names_the_key_and_the_file(project: Path):
    experiment(project / "mine", "bad", "trainer:\n  train_batch_sizes: 3\n  polcy:\n    model: {path: x}")
    text = message(["--config-dir", "mine", "+experiment=bad"])
    assert text.startswith("2 problems in the configuration:")
    file = "(in mine/experiment/bad.yaml)"
    assert f"unknown key trainer.train_batch_sizes: did you mean trainer.train_batch_size? {file}" in text
    assert f"unknown key trainer.polcy: did you mean trainer.policy? {file}" in text


def test_an_experiment_built_on_another_names_the_file_that_is_wrong(project: Path):
    experiment(project / "mine", "inner", "trainer: {sed: 3}")
    experiment(project / "mine", "outer", "defaults: [inner]\ntrainer: {seed: 4}")
    text = message(["--config-dir", "mine", "+experiment=outer"])
    assert text == "unknown key trainer.sed: did you mean trainer.seed? (in mine/experiment/inner.yaml)"


def test_wrong_types_name_key_value_expected_type_and_place_all_at_once(project: Path):
    experiment(project / "mine", "bad", "trainer:\n  epochs: many\n  bf16: 1")
    text = message(["--config-dir", "mine", "+experiment=bad", "trainer.seed=1.5", "trainer.run_name=123"])
    assert "trainer.epochs is 'many' (str): expected int (in mine/experiment/bad.yaml)" in text
    assert "trainer.bf16 is 1 (int): expected bool. Write true or false (in mine/experiment/bad.yaml)" in text
    assert "trainer.seed is 1.5 (float): expected int (on the command line)" in text
    assert "trainer.run_name is 123 (int): expected str. Quote text that looks like a number" in text


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.policy.optimizer_config.adam_betas=[0.9]", "expected list of 2 float"),
        ("trainer.max_staleness=abc", "trainer.max_staleness is 'abc' (str): expected int"),
        ("trainer.seed=true", "trainer.seed is True (bool): expected int (on the command line)"),
        ("trainer.policy.model={path: 3}", "trainer.policy.model.path is 3 (int): expected str"),
        ("trainer.epochs=null", "trainer.epochs is None (null): expected int"),
        ("generator.kv_cache_memory_gb=all", "expected float or null"),
        ("trainer.policy=3", "trainer.policy is a section. Set one of its keys: model, optimizer_config"),
        ("~trainer.seed", "keys cannot be deleted"),
        ("trainer.seed=1,2", "sweeps are not supported"),
        ("hydra.run.dir=x", "Output goes to trainer.run_dir"),
        ("trainer.run_dir=${trainer.nme}", "trainer.run_dir cannot be resolved: Interpolation key 'trainer.nme'"),
        ("experiment=quickstart", "Write +experiment=quickstart"),
        ("quickstart", "cannot read 'quickstart' on the command line, expected key=value"),
        ("--confg-dir=x", "unrecognized arguments: --confg-dir=x. Usage: "),
        ("--config-dir=nowhere", "--config-dir is nowhere: there is no such folder"),
    ],
)
def test_what_cannot_be_read_says_what_to_write(override: str, expected: str):
    assert expected in message([override])


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("trainer.epochs=0", "trainer.epochs is 0: it must be at least 1"),
        ("trainer.seed=4294967296", "seed is 4294967296: it must be at least 0 and at most 2147483647"),
        ("trainer.eval_interval=0", "trainer.eval_interval is 0: it must be at least 1, or -1"),
        ("trainer.policy.optimizer_config.lr=-1", "lr is -1: it must be at least 0"),
        ("trainer.policy.optimizer_config.lr=nan", "lr is nan: it must be at least 0"),
        ("trainer.policy.optimizer_config.lr=inf", "lr is inf: it must be at least 0"),
        ("trainer.policy.optimizer_config.adam_eps=0", "adam_eps is 0: it must be above 0"),
        ("trainer.policy.optimizer_config.adam_betas=[0.9,1]", "is [0.9, 1]: it must be at least 0 and below 1"),
        ("generator.sampling_params.top_p=0", "top_p is 0: it must be above 0 and at most 1"),
        ("trainer.algorithm.clip_ratio_c=1", "clip_ratio_c is 1: it must be above 1"),
        ("generator.kv_cache_memory_gb=0", "kv_cache_memory_gb is 0: it must be above 0"),
        ("trainer.bf16=yes", "trainer.bf16 is 'yes' (str): expected bool. Write true or false"),
        ("trainer.run_name=", "trainer.run_name is '': it must not be empty"),
        (
            "trainer.logger=[wanb]",
            "did you mean wandb? It must be one of console, jsonl, tensorboard, wandb, or your own",
        ),
        ("trainer.policy.megatron_config.transformer_impl=te", "It must be one of auto, torch, transformer_engine"),
        ("trainer.policy.megatron_config.recompute_granularity=ful", "did you mean full?"),
        ("trainer.policy.optimizer_config.scheduler=cosin", "did you mean cosine?"),
        ("trainer.algorithm.advantage_estimator=gpro", "did you mean grpo?"),
        ("trainer.algorithm.policy_loss_type=regulr", "did you mean regular?"),
        ("trainer.algorithm.loss_reduction=token_men", "did you mean token_mean?"),
        ("trainer.algorithm.kl_estimator_type=k4", "It must be one of k1, k2, k3"),
        ("generator.model_dtype=bf16", "It must be one of bfloat16, float16, float32"),
    ],
)
def test_a_value_out_of_range_or_an_unknown_name_says_what_is_allowed(override: str, expected: str):
    assert expected in message([override])


@pytest.mark.parametrize(
    ("overrides", "corrections"),
    [
        ([], ()),
        (["generator.quantization=fp8"], ("token_tis",)),
        (["trainer.source=streaming"], ("token_tis",)),
        (["trainer.source=streaming", "trainer.max_staleness=0"], ()),
        (["trainer.source=own:Source"], ()),
        (["trainer.source=own:Source", "trainer.max_staleness=2"], ("token_tis",)),
        (["generator.quantization=fp8", "trainer.source=streaming", "trainer.max_staleness=0"], ("token_tis",)),
        (["generator.quantization=fp8", "trainer.algorithm.policy_loss_type=dppo"], ()),
        (["generator.quantization=fp8", "trainer.algorithm.corrections=[icepop]"], ("icepop",)),
        (["generator.quantization=fp8", "trainer.algorithm.corrections=[]"], ()),
    ],
)
def test_samples_of_older_or_quantised_weights_are_corrected_unless_a_correction_is_chosen(
    overrides: list[str], corrections: tuple[str, ...]
):
    assert load_config(overrides).trainer.algorithm.corrections == corrections


def test_names_of_the_users_functions_pass_and_reading_a_configuration_imports_no_torch():
    code = "import sys; from skyrl_train.config import main_config; main_config(sys.argv[1:]); "
    code += "assert 'torch' not in sys.modules"
    keys = ["policy_loss_type=mine.losses:mine", "advantage_estimator=mine:credit", "corrections=[token_tis,mine:c]"]
    subprocess.run([sys.executable, "-c", code, *(f"trainer.algorithm.{key}" for key in keys)], check=True)


def test_custom_modules_are_imported_before_names_are_looked_up(project: Path, monkeypatch: pytest.MonkeyPatch):
    (own := project / "my_losses.py").write_text(
        "from skyrl_train.algorithms.tables import LOSSES\n"
        "def plain(tokens): return -tokens.logprobs * tokens.advantages\n"
        "LOSSES.register('plain', plain)\n"
    )
    monkeypatch.syspath_prepend(project)
    monkeypatch.setattr(LOSSES, "_entries", dict(LOSSES._entries))
    assert "did you mean" not in message(["trainer.algorithm.policy_loss_type=plain"])
    config = main_config(["trainer.custom_modules=[my_losses]", "trainer.algorithm.policy_loss_type=plain"])
    assert LOSSES.resolve(config.trainer.algorithm.policy_loss_type).__module__ == "my_losses"
    assert "trainer.custom_modules names my_loses, which cannot be imported" in message(
        ["trainer.custom_modules=[my_loses]"]
    )
    own.write_text(own.read_text() + "LOSSES.register('newer', plain)\n")
    keys = ["trainer.custom_modules=[my_losses]", "trainer.algorithm.policy_loss_type=newer"]
    assert "was edited after" in message(keys), "what it registers now is unknown here"


def test_an_unknown_experiment_names_the_ones_there_are(project: Path):
    experiment(project / "mine", "big", "trainer: {seed: 1}")
    text = message(["--config-dir", "mine", "+experiment=quikstart"])
    assert text.startswith("experiment 'quikstart' does not exist: did you mean quickstart? Available: big, ")
    assert ", long_addition, " in text


def test_experiments_are_found_in_the_configs_folder_here_and_through_hydra_searchpath(project: Path):
    experiment(project / "configs", "here", "trainer: {seed: 7}")
    experiment(project / "else where", "there", "trainer: {seed: 8}")
    assert main_config(["+experiment=here"]).trainer.seed == 7
    assert main_config([f"hydra.searchpath=['file://{project}/else where']", "+experiment=there"]).trainer.seed == 8
    assert load_config(["+experiment=there"], folders=["else where"]).trainer.seed == 8


def test_an_experiment_of_the_same_name_as_a_shipped_one_is_refused(project: Path):
    experiment(project / "configs", "quickstart", "trainer: {seed: 7}")
    text = message(["+experiment=quickstart"])
    assert text.startswith("experiment/quickstart is ambiguous: it matches ")
    assert "configs/experiment/quickstart.yaml" in text


def test_an_experiment_without_its_first_line_says_so(project: Path):
    experiment(project / "configs", "bare", "trainer: {seed: 7}", first_line="# my experiment")
    assert message(["+experiment=bare"]) == (
        "configs/experiment/bare.yaml: the first line is missing. Add `# @package _global_`"
    )


def test_an_experiment_that_is_not_yaml_names_its_file_and_line(project: Path):
    experiment(project / "configs", "broken", "trainer: {seed: 7")
    text = message(["+experiment=broken"])
    assert text.startswith("invalid YAML: ")
    assert re.search(r"broken\.yaml.*line 3", text, re.DOTALL)


def test_the_written_config_reads_back_as_the_same_config(project: Path):
    config = load_config(["+experiment=quickstart", "trainer.policy.optimizer_config.lr=1e-6", "trainer.run_name='7'"])
    (project / "config.yaml").write_text(to_yaml(config))
    assert main_config(["--config-file", "config.yaml"]) == config
    texts = ["1e3", "1e-6", "-2E+5", "1.5e3", "12", "no", "2026-11-30", "~", "é", "1_0e2"]
    texts += ["a ${b} c", "${x}", "\\${x}", "\\frac \\\\${trainer.seed}", "\\"]
    named = dataclasses.replace(config, extra={str(number): text for number, text in enumerate(texts)})
    (project / "texts.yaml").write_text(to_yaml(named))
    assert main_config(["--config-file", "texts.yaml"]).extra == named.extra
    assert main_config(["--config-file", "config.yaml", "trainer.seed=3"]).trainer.seed == 3


def test_what_a_written_config_derives_follows_the_keys_that_change(project: Path):
    """A copy with another name must not write into the folder of the run that wrote it."""
    (project / "config.yaml").write_text(to_yaml(load_config(["+experiment=quickstart", "trainer.export_path=mine"])))
    overrides = ["trainer.run_name=second", "trainer.policy.model.path=other", "trainer.bf16=true"]
    config = main_config(["--config-file", "config.yaml", *overrides])
    trainer = config.trainer
    assert (trainer.run_dir, trainer.ckpt_path) == ("runs/second", "runs/second/checkpoints")
    assert trainer.ref.model.path == trainer.critic.model.path == "other"
    assert config.generator.model_dtype == "bfloat16"
    assert trainer.export_path == "mine", "what was set stays"


def test_an_experiment_overrides_what_a_written_config_derives(project: Path):
    """The file has the default environment, which follows other keys, and the experiment its own."""
    (project / "config.yaml").write_text(to_yaml(load_config([])))
    for experiment in ("search", "quickstart"):
        own = load_config([f"+experiment={experiment}"])
        config = main_config(["--config-file", "config.yaml", f"+experiment={experiment}"])
        assert config.environment == own.environment and config.generator == own.generator
        assert config.trainer.ref == own.trainer.ref
    command = ["--config-file", "config.yaml", "+experiment=search", "environment.env_class=text2sql"]
    assert main_config(command).environment.env_class == "text2sql"


def test_a_secret_is_read_and_never_written_out(project: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("MY_KEY", "xyzzy")
    config = load_config(["generator.http_api_key=${oc.env:MY_KEY}"])
    assert config.generator.http_api_key == "xyzzy"
    assert "xyzzy" not in repr(config) and "xyzzy" not in to_yaml(config)
    (project / "config.yaml").write_text(to_yaml(config))
    assert message(["--config-file", "config.yaml"]).startswith(
        "generator.http_api_key is '***': this is the mask of a secret in saved configurations. Set the real value"
    )
    assert main_config(["--config-file", "config.yaml", "generator.http_api_key=null"]) == load_config([])
    assert "12345" not in message(["generator.http_api_key=12345"])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (b"a: [", "--config-file is given.yaml: it cannot be read (while parsing a flow node"),
        (b"\xff", "--config-file is given.yaml: it cannot be read ('utf-8' codec"),
        (b"", "--config-file is given.yaml: not a configuration. Name one such as the config.yaml of a run"),
        (b"- 1", "--config-file is given.yaml: not a configuration. Name one such as the config.yaml of a run"),
        (b"trainer: 3", "trainer is 3: expected a mapping of keys to values (in given.yaml)"),
        (b"data: {}", "trainer is missing"),
    ],
)
def test_a_file_that_is_not_a_complete_configuration_is_refused(
    text: bytes, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    Path("given.yaml").write_bytes(text)
    assert expected in message(["--config-file", "given.yaml"])


def test_cfg_job_prints_the_resolved_yaml_and_help_names_the_base(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as done:
        main_config(["--cfg", "job", "trainer.seed=9"])
    assert done.value.code == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["seed"] == 9 and printed["trainer"]["run_dir"] == "runs/test_run"
    with pytest.raises(SystemExit) as done:
        main_config(["--help"])
    assert done.value.code == 0
    assert "ppo_base_config.yaml" in capsys.readouterr().out


def test_reading_the_configuration_imports_nothing_heavy():
    code = (
        "import sys; from skyrl_train.config import load_config; load_config(['+experiment=quickstart']); "
        "print([m for m in ('torch', 'ray', 'vllm', 'megatron', 'transformers', 'datasets') if m in sys.modules])"
    )
    assert in_new_process("-c", code) == "[]"


def test_the_configuration_reference_is_up_to_date():
    assert in_new_process(str(Path(__file__).parents[3] / "scripts" / "config_reference.py"), "--check") == ""


def unread_keys(schema: type) -> list[str]:
    """Keys that nobody reads but the checks; what a property of the configuration is made of is read by it."""
    package = Path(__file__).parents[3] / "skyrl_train"
    folders = {path: path.relative_to(package).parts[0] for path in package.rglob("*.py")}
    readers = "\n".join(path.read_text() for path, folder in folders.items() if folder not in ("config", "checks"))
    properties = "\n".join(path.read_text() for path, folder in folders.items() if folder == "config")
    attributes = {*re.findall(r"\.(\w+)", readers), *re.findall(r"self\.(\w+)", properties)}
    # Functions of skyrl_train.algorithms take keys as keyword-only parameters (`AlgorithmConfig.values`).
    algorithms = "\n".join(path.read_text() for path, folder in folders.items() if folder == "algorithms")
    parameters = re.findall(r"def \w+\([^)]*\*,\s([^)]*)\)", algorithms)
    attributes |= {name for found in parameters for name in re.findall(r"(\w+):", found)}
    attributes |= set(re.findall(r'values\["(\w+)"\]', algorithms))
    attributes.add("strict_config")  # config/skyrl_04 reads it before there is a Config
    keys = [key for key, kind in key_types(schema).items() if not dataclasses.is_dataclass(kind)]
    return [key for key in keys if key.rpartition(".")[2] not in attributes]


def test_every_key_is_read_by_the_code():
    assert unread_keys(Config) == []


def test_the_base_of_fine_tuning_has_the_keys_of_its_dataclasses_and_builds_on_the_other_base():
    base = yaml.safe_load(SFT.base_yaml())
    kinds = key_types(SftConfig)
    assert sorted(yaml_keys(base, kinds)) == sorted(kinds)
    # The folder of traces is that of the run, and the runs have different names.
    config, other = load_sft_config(), load_config(["trainer.run_name=sft"])
    assert config.trainer.policy.megatron_config == other.trainer.policy.megatron_config
    assert config.trainer.train_batch_size != other.trainer.train_batch_size


def test_fine_tuning_refuses_keys_and_experiments_of_reinforcement_learning():
    engines = ("generator.n_samples_per_prompt=1", "trainer.policy.model.lora.sync=adapter")
    for override in (*engines, "trainer.algorithm.use_kl_loss=false"):
        with pytest.raises(ConfigError, match=r"^unknown key .* \(on the command line\)$"):
            load_sft_config([override])
    with pytest.raises(ConfigError, match=r"quickstart.yaml .* another program: .*main_base \+experiment=quickstart"):
        load_sft_config(["+experiment=quickstart"])


def test_a_written_config_of_fine_tuning_reads_back_as_the_same(project: Path):
    config = load_sft_config(["+experiment=sft_quickstart", "data.max_length=99"])
    (project / "config.yaml").write_text(to_yaml(config))
    assert SFT.read(["--config-file", "config.yaml"]) == config


def test_every_key_of_fine_tuning_is_read_by_the_code():
    assert unread_keys(SftConfig) == []


def test_help_of_fine_tuning_names_its_own_program(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as done:
        SFT.read(["--help"])
    printed = capsys.readouterr().out
    assert done.value.code == 0 and "skyrl_train.entrypoints.main_sft" in printed and "sft_quickstart" in printed


def test_the_base_of_verify_layout_has_the_keys_of_its_dataclasses_and_takes_experiments():
    base = yaml.safe_load(VERIFY.base_yaml())
    kinds = key_types(VerifyLayoutConfig)
    assert sorted(yaml_keys(base, kinds)) == sorted(kinds)
    config = VERIFY.load(["+experiment=quickstart", "verify.num_ranks=4"])
    assert config.trainer.policy.megatron_config.pipeline_model_parallel_size == 2 and config.verify.num_ranks == 4
    assert unread_keys(VerifyLayoutConfig) == []


def test_adapters_of_a_critic_are_refused_with_the_reason():
    with pytest.raises(ConfigError) as caught:
        load_config(["trainer.critic.model.lora.rank=8"])
    assert caught.value.problems == (
        "trainer.critic.model.lora.rank=8: a critic has no adapters, all its weights are trained. Remove the key (on "
        "the command line)",
    )
