"""The programs in examples/skyrl_04, which have the form of skyrl_train 0.4's, train two steps."""

from __future__ import annotations

import ast
import importlib
import json
import math
import os
import re
import shlex
import subprocess
import sys
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import torch

from skyrl_train.entrypoints import command
from skyrl_train.entrypoints.main_base import validate_cfg
from skyrl_train.megatron.verify.local_ranks import run_on_ranks
from skyrl_train.ranks import Rendezvous
from tests.support.hydra_main import composed
from tests.support.in_process import InProcess, Trained
from tests.support.jobs import ROOT, WITHOUT_VLLM, start_command, write_world
from tests.support.tiny import tiny_tokenizer

EXAMPLES = ROOT / "examples/skyrl_04"
IN_PROCESS = ("multiply", "custom_advantage", "turn_level_rewards", "custom_generator", "llm_as_a_judge", "async")
JUDGE = "http://127.0.0.1:8000/v1"
"""Address of the judge in the command of the example."""
ENV_CLASS = "rewards:Digits"
"""Environment of each row, as the rows of the quickstart name theirs."""
TINY = (
    *("trainer.train_batch_size=8", "trainer.policy_mini_batch_size=4", "trainer.max_tokens_per_microbatch=96"),
    *("trainer.max_prompt_length=16", "trainer.bf16=false", "generator.n_samples_per_prompt=4", "trainer.logger=[]"),
    *("generator.sampling_params.max_generate_length=4", f"environment.env_class={ENV_CLASS}", "data.val_data=[]"),
    *("trainer.placement.colocate_all=false", "trainer.max_training_steps=2", "generator.kv_cache_memory_gb=0.1"),
    "trainer.algorithm.use_kl_loss=false",
)


def commands(name: str) -> list[list[str]]:
    """Script and arguments of each command in an example's docstring; the last is the program."""
    text = ast.get_docstring(ast.parse((EXAMPLES / name / f"main_{name}.py").read_text())) or ""
    found = re.findall(r"^python (.*)$", text.replace("\\\n", ""), re.MULTILINE)
    return [shlex.split(each) for each in found]


def own_arguments(name: str) -> list[str]:
    """Arguments of an example besides the experiment, whose model and data are those of the test."""
    script, experiment, *own = commands(name)[-1]
    assert (script, experiment) == (f"main_{name}.py", "+experiment=quickstart")
    return own


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_custom_loss_trains_by_its_command_line(tmp_path: Path):
    """With keys of 0.4, in a Ray task; the rank is another process, which imports the program."""
    world = write_world(tmp_path / "world")
    command = [sys.executable, str(EXAMPLES / "custom_loss/main_custom_loss.py"), "--config-dir", "configs"]
    arguments = ["+experiment=tiny", *own_arguments("custom_loss"), "trainer.strategy=fsdp2", WITHOUT_VLLM]
    job = start_command([*command, *arguments], world, "tiny", uuid.uuid4().hex, {})
    try:
        assert job.wait() == 0, job.story()
        assert not (left := job.left_behind()), left
    finally:
        job.kill()
    assert [row["trainer/global_step"] for row in job.metrics] == [1, 2]
    for row in job.metrics:
        assert row["policy/grad_norm"] > 0
        assert row["policy/loss_metrics/largest_drift"] > 0, "the second mini-batch is trained on changed weights"
    assert json.loads((job.run_dir / "run.json").read_text())["status"] == "finished"
    assert "drift_coef: 0.1" in (job.run_dir / "config.yaml").read_text()
    assert "local Ray is up" in job.output, "the task knows that all processes are of this host"
    assert "trainer.strategy=fsdp2" in job.output, "the translation is reported"


def entry_points(rendezvous: Rendezvous, arguments: tuple[str, str, list[str]]) -> dict[str, Trained]:
    """Call each example's `skyrl_entrypoint`; its run trains in this process."""
    world, judge, overrides = arguments
    sys.path.insert(0, world)
    os.chdir(world)
    process = InProcess(rendezvous)
    command.run = process.train
    results = {}
    for name in IN_PROCESS:
        sys.path.insert(0, str(EXAMPLES / name))
        module = importlib.import_module(f"main_{name}")
        sys.modules.pop("env", None)  # two examples have a module of this name
        cfg = composed(*overrides, *(text.replace(JUDGE, judge) for text in own_arguments(name)))
        validate_cfg(cfg)
        module.skyrl_entrypoint._function(cfg)
        results[name] = process.trained
    return results


class Judge(BaseHTTPRequestHandler):
    """A server with OpenAI's API that grades an answer by the number of its digits."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        (text,) = re.findall(r"^answer: (.*)", body["messages"][0]["content"], re.MULTILINE)
        is_asked = self.path == "/v1/chat/completions" and body["model"] == "judge"
        message = {"role": "assistant", "content": f"I like digits.\ngrade: {sum(map(str.isdigit, text))}"}
        reply = json.dumps({"choices": [{"index": 0, "message": message}]}).encode()
        self.send_response(200 if is_asked else 404)
        self.send_header("Content-Length", str(len(reply)))
        self.end_headers()
        self.wfile.write(reply)

    def log_message(self, *arguments: object) -> None:
        """Its requests are not logged."""


@contextmanager
def judge() -> Iterator[str]:
    """Address of a judge."""
    with ThreadingHTTPServer(("127.0.0.1", 0), Judge) as server:
        thread = Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1"
        finally:
            server.shutdown()
            thread.join()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Trained]:
    world = write_world(tmp_path_factory.mktemp("examples") / "world")
    rows = [json.loads(line) | {"env_class": ENV_CLASS} for line in (world / "rows.jsonl").read_text().splitlines()]
    (world / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for script, *arguments in commands("multiply")[:-1]:
        subprocess.run([sys.executable, EXAMPLES / "multiply" / script, *arguments], cwd=world, check=True)
    files = [f"trainer.policy.model.path={world / 'model'}", f"data.train_data=[{world / 'rows.jsonl'}]"]
    with judge() as url:
        (found,) = run_on_ranks(entry_points, (str(world), url, [*TINY, *files]), 1, timeout_s=300)
    return found  # type: ignore[no-any-return]


@pytest.mark.parametrize("name", IN_PROCESS)
def test_an_example_trains_two_steps(name: str, trained: dict[str, Trained]):
    norms = [metrics["policy/grad_norm"] for metrics in trained[name].metrics]
    assert len(norms) == 2 and all(math.isfinite(norm) and norm > 0 for norm in norms), norms


def test_the_environment_of_an_example_rewards_digits(trained: dict[str, Trained]):
    found, tokenizer = trained["multiply"], tiny_tokenizer()
    samples = [sample for groups in found.groups for group in groups for sample in group.samples]
    assert len(samples) == 2 * 8 * 4
    for sample in samples:
        answer = tokenizer.decode(sample.token_ids[sample.prompt_length :], skip_special_tokens=True).strip()
        assert sample.reward == 0.5 * sum(map(str.isdigit, answer)) / max(len(answer), 1), "and none is the product"


def test_the_estimator_of_an_example_subtracts_the_median_of_each_group(trained: dict[str, Trained]):
    found = trained["custom_advantage"]
    for groups, advantages in zip(found.groups, found.advantages, strict=True):
        rewards = torch.tensor([[sample.reward for sample in group.samples] for group in groups])
        expected = rewards - rewards.sort(-1).values[:, 1:3].mean(-1, keepdim=True)
        lengths = torch.tensor([len(sample.token_ids) for group in groups for sample in group.samples])
        mask = torch.cat([sample.loss_mask for group in groups for sample in group.samples])
        torch.testing.assert_close(advantages[mask], expected.flatten().repeat_interleave(lengths)[mask].float())


def test_the_trainer_of_an_example_changes_rewards_of_turns_and_logs_its_metric(trained: dict[str, Trained]):
    found = trained["turn_level_rewards"]
    samples = [sample for groups in found.groups for group in groups for sample in group.samples]
    later = [sample for sample in samples if sample.turns == 2]
    assert len(later) > 32
    seconds = set()
    for sample in later:
        is_end = sample.loss_mask & ~torch.cat([sample.loss_mask[1:], torch.tensor([False])])
        first, second = sample.rewards[is_end].tolist()
        assert first in (0, 0.25, 0.5) and second in (0, 0.125, 0.25), "digits that are right, of four characters"
        seconds.add(second)
    assert 0.125 in seconds
    assert found.own_metrics == {"reward/later_turns": 0.5}


def test_the_asynchronous_example_streams_with_the_defaults_of_streaming(trained: dict[str, Trained]):
    found = trained["async"]
    trainer = found.config.trainer
    assert (trainer.source, trainer.max_staleness, trainer.algorithm.corrections) == ("streaming", 2, ("token_tis",))
    stale = [metrics["staleness"] for metrics in found.metrics]
    assert stale[1] > stale[0] == 0, "the groups of the second step were sampled before the first update"


def test_the_generator_of_an_example_trains_both_answers_and_not_the_refusal_between_them(trained: dict[str, Trained]):
    found, tokenizer = trained["custom_generator"], tiny_tokenizer()
    samples = [sample for groups in found.groups for group in groups for sample in group.samples]
    assert len(samples) == 2 * 8 * 4 and all(sample.turns == 2 for sample in samples)
    for sample in samples:
        after = slice(sample.prompt_length, None)
        is_written, rewards = sample.loss_mask[after], sample.rewards[after]
        text = tokenizer.decode(sample.token_ids[after])
        assert tokenizer.decode(sample.token_ids[after][~is_written]) == " no. again: " == text[4:-4]
        earned = [0.1 * sum(map(str.isdigit, answer)) / 4 for answer in (text[:4], text[-4:])]
        assert (rewards[3], rewards[-1]) == tuple(earned) and rewards.sum() == sum(earned)
    assert found.own_metrics["second_chance/avg_attempts"] == 2


def test_the_judge_of_an_example_gives_the_rewards(trained: dict[str, Trained]):
    tokenizer = tiny_tokenizer()
    samples = [sample for groups in trained["llm_as_a_judge"].groups for group in groups for sample in group.samples]
    assert len(samples) == 2 * 8 * 4
    for sample in samples:
        answer = tokenizer.decode(sample.token_ids[sample.prompt_length :])
        assert sample.reward == sum(map(str.isdigit, answer)) / 10
        assert sample.env_metrics["judge_characters"] == len("I like digits.\ngrade: 4")
