"""LoRA as a user runs it: an adapter that main_sft wrote is trained on by main_base, in either way to the engines."""

from __future__ import annotations

import json
import sys
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from skyrl_train.ranks import free_port
from tests.support.adapters import peft_model, read_adapter
from tests.support.checkpoints import tensors_of
from tests.support.jobs import GREEDILY, GREEDY_MAIN, Job, run_to_end, start_command, write_world

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
LORA = [
    "trainer.policy.model.lora.rank=4",
    "trainer.policy.model.lora.alpha=8",
    "trainer.policy.model.lora.exclude_modules=[o_proj]",
]
FINE_TUNING = [
    *LORA,
    "data.train_data=[answers.jsonl]",
    "data.val_data=[answers.jsonl]",
    "data.max_length=32",
    "trainer.policy.model.path=model",
    "trainer.bf16=false",
    "trainer.logger=[console,jsonl]",
    "trainer.run_name=tuned",
    "trainer.train_batch_size=16",
    "trainer.max_tokens_per_microbatch=64",
    "trainer.epochs=8",
    "trainer.hf_save_interval=4",
    "trainer.policy.optimizer_config.lr=2e-2",
    "trainer.placement.policy_num_gpus_per_node=2",
]
# Samples are greedy, and one mini-batch is a step, so that what is trained on does not depend on the engine.
TRAINING = [
    *LORA,
    "trainer.policy.model.lora.path=runs/tuned/exports/global_step_16/adapter",
    "environment.env_class=noting:Notes",
    "data.val_data=[rows.jsonl]",
    "generator.enable_http_endpoint=true",
    *GREEDILY,
    "trainer.policy_mini_batch_size=8",
    "trainer.algorithm.advantage_estimator=reinforce++",
    "trainer.algorithm.use_kl_loss=true",
    "trainer.algorithm.kl_loss_coef=0.1",
    "trainer.policy.optimizer_config.lr=1e-2",
    "trainer.hf_save_interval=1",
]
NUM_ROWS, NUM_SAMPLES = 16, 8 * 4
# For each sample that is scored, writes down the question, the answer, what the engine serves, and which trainers live.
NOTING = """\
import json, os
from pathlib import Path
import psutil
from rewards import Digits
from scripts.watch_versions import served_versions

class Notes(Digits):
    def init(self, prompt):
        self.question = prompt[-1]["content"]
        return super().init(prompt)

    def step(self, action):
        served = served_versions(f"http://127.0.0.1:{os.environ['PORT']}/v1")
        trainers = set()
        for process in psutil.process_iter():
            try:
                log = os.readlink(f"/proc/{process.pid}/fd/1")
            except OSError:
                continue
            if log.startswith(f"{os.environ['RUN_DIR']}/logs") and not Path(log).name.startswith("engine"):
                trainers.add(Path(log).stem)
        note = {"question": self.question, "answer": action, "served": served, "trainers": sorted(trainers)}
        with open(os.environ["RUN_DIR"] + "/notes", "a") as file:
            file.write(json.dumps(note) + "\\n")
        return super().step(action)
"""


@dataclass(frozen=True)
class Run:
    """A finished run and what its environment wrote down, in the order of its phases."""

    job: Job
    notes: list[dict[str, Any]]

    @property
    def metrics(self) -> list[dict[str, float]]:
        return self.job.metrics

    def adapter(self, step: int) -> dict[str, Tensor]:
        return read_adapter(self.export(step) / "adapter")

    def export(self, step: int) -> Path:
        return self.job.run_dir / f"exports/global_step_{step}"


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_world(tmp_path_factory.mktemp("lora") / "world", num_rows=NUM_ROWS)
    (folder / "noting.py").write_text(NOTING)
    answers = [(f"{n}+{n % 7}=", str(n + n % 7)) for n in range(32)]
    rows = [{"prompt": [{"role": "user", "content": asked}], "response": answer} for asked, answer in answers]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


@pytest.fixture(scope="module")
def tuned(world: Path) -> Job:
    module = [sys.executable, "-m", "skyrl_train.entrypoints.main_sft"]
    job = start_command([*module, *FINE_TUNING], world, "tuned", uuid.uuid4().hex, {})
    try:
        assert job.wait() == 0, job.story()
        assert not (left := job.left_behind()), left
    finally:
        job.kill()
    return job


def train(world: Path, name: str, *overrides: str) -> Run:
    port = free_port()
    environment = {"RUN_DIR": str(world / "runs" / name), "PORT": str(port)}
    settings = [f"trainer.run_name={name}", f"generator.http_endpoint_port={port}", *TRAINING, *overrides]
    code, job = run_to_end(world, *settings, environment=environment, main=GREEDY_MAIN)
    assert code == 0, job.story()
    return Run(job, [json.loads(line) for line in (job.run_dir / "notes").read_text().splitlines()])


@pytest.fixture(scope="module")
def alone(world: Path, tuned: Job) -> Run:
    """The adapter itself goes to an engine with devices of its own."""
    return train(world, "alone", "trainer.policy.model.lora.sync=adapter", "trainer.verify_sync_every=1")


@pytest.fixture(scope="module")
def merged(world: Path, tuned: Job) -> Run:
    """Merged weights go to an engine on the trainer's device."""
    settings = ["trainer.placement.colocate_all=true", "trainer.verify_sync_every=0"]
    return train(world, "merged", *settings)


def test_fine_tuning_lowers_the_loss_that_peft_computes_of_its_adapter(world: Path, tuned: Job):
    metrics, folder = tuned.metrics, tuned.run_dir / "exports/global_step_16/adapter"
    assert "2 policy ranks (DP2)" in tuned.output
    assert metrics[-1]["sft/eval_loss"] < metrics[0]["sft/eval_loss"] - 0.5
    model, tokenizer = (
        peft_model(world / "model", folder).eval(),
        transformers.AutoTokenizer.from_pretrained(world / "model"),
    )
    total, count = 0.0, 0
    for line in (world / "answers.jsonl").read_text().splitlines():
        row = json.loads(line)
        asked = question_ids(tokenizer, row["prompt"][0]["content"])
        answered = tokenizer.encode(row["response"])
        lost = -logprobs(model, asked, answered)
        total, count = total + float(lost.sum()), count + len(answered)
    assert metrics[-1]["sft/eval_loss"] == pytest.approx(total / count, abs=1e-5)


def logprobs(model: Any, asked: list[int], answered: list[int]) -> Tensor:
    """[len(answered)]"""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*asked, *answered]])).logits[0, len(asked) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(answered)[:, None])[:, 0]


@pytest.mark.parametrize("name", ["alone", "merged"])
def test_the_engine_answers_with_the_adapter_from_the_first_sample_to_the_last(
    name: str, world: Path, tuned: Job, request: pytest.FixtureRequest
):
    run: Run = request.getfixturevalue(name)
    before, after = run.notes[:NUM_ROWS], run.notes[-NUM_ROWS:]
    first, last = tuned.run_dir / "exports/global_step_16/adapter", run.export(2) / "adapter"
    base = transformers.AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32)
    assert greedy_answers(world, peft_model(world / "model", first), before) == answers(before)
    assert greedy_answers(world, peft_model(world / "model", last), after) == answers(after)
    assert greedy_answers(world, base, before) != answers(before)
    assert len(set(answers(before))) > 1


def answers(notes: list[dict[str, Any]]) -> list[str]:
    return [note["answer"] for note in notes]


def greedy_answers(world: Path, model: Any, notes: list[dict[str, Any]]) -> list[str]:
    """As `generator.sampling_params.max_generate_length` of the tiny world cuts them."""
    tokenizer, found = transformers.AutoTokenizer.from_pretrained(world / "model"), []
    for note in notes:
        ids = question_ids(tokenizer, note["question"])
        written: list[int] = []
        while len(written) < 8 and tokenizer.eos_token_id not in written:
            with torch.no_grad():
                written.append(int(model.eval()(input_ids=torch.tensor([[*ids, *written]])).logits[0, -1].argmax()))
        found.append(tokenizer.decode(written, skip_special_tokens=True))
    return found


def question_ids(tokenizer: Any, question: str) -> list[int]:
    message = [{"role": "user", "content": question}]
    return list(tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False))


@pytest.mark.parametrize("name", ["alone", "merged"])
def test_the_served_name_moves_on_with_every_step(name: str, request: pytest.FixtureRequest):
    run: Run = request.getfixturevalue(name)
    served = [note["served"] for note in run.notes]
    phases = [(0, NUM_ROWS + NUM_SAMPLES), (1, NUM_SAMPLES), (2, NUM_ROWS)]
    assert served == [[f"{name}@{version}"] for version, num in phases for _ in range(num)]


def test_the_kl_term_is_of_the_base_model(world: Path, tuned: Job, merged: Run):
    """That of the samples of the first step, which the environment saw, as transformers and PEFT compute it."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(world / "model")
    base = transformers.AutoModelForCausalLM.from_pretrained(world / "model", dtype=torch.float32)
    adapted = peft_model(world / "model", tuned.run_dir / "exports/global_step_16/adapter").eval()
    total, count = 0.0, 0
    for note in merged.notes[NUM_ROWS : NUM_ROWS + NUM_SAMPLES]:
        asked, answered = question_ids(tokenizer, note["question"]), tokenizer.encode(note["answer"])
        answered += [tokenizer.eos_token_id] * (len(answered) < 8)
        ratio = logprobs(base, asked, answered) - logprobs(adapted, asked, answered)
        total, count = total + float((ratio.exp() - ratio - 1).sum()), count + len(answered)
    assert merged.metrics[1]["policy/policy_kl"] == pytest.approx(total / count, rel=1e-4)


def test_no_process_holds_the_reference(alone: Run, merged: Run):
    """Processes that end between phases, with LoRA too, are in tests/cpu/mcore/residency/test_state.py."""
    assert {tuple(note["trainers"]) for note in alone.notes + merged.notes} == {("policy-0",)}


def test_both_ways_and_placements_end_at_the_same_adapter_bit_for_bit(tuned: Job, alone: Run, merged: Run):
    before = read_adapter(tuned.run_dir / "exports/global_step_16/adapter")
    for step in (1, 2):
        mine, theirs = merged.adapter(step), alone.adapter(step)
        assert mine.keys() == theirs.keys() == before.keys()
        assert not [name for name in mine if not torch.equal(mine[name], theirs[name])]
        assert not [name for name in mine if torch.equal(mine[name], before[name])]
        before = mine
    said = [sorted((note["question"], note["answer"]) for note in run.notes) for run in (alone, merged)]
    assert said[0] == said[1]


def test_an_export_is_what_peft_merges_and_the_base_is_as_it_was(world: Path, merged: Run):
    model = peft_model(world / "model", merged.export(2) / "adapter")
    expected = dict(model.merge_and_unload().named_parameters())
    exported, base = tensors_of(merged.export(2)), tensors_of(world / "model")
    assert exported.keys() == base.keys()
    for name, tensor in exported.items():
        torch.testing.assert_close(tensor, expected[name].data, rtol=1e-5, atol=1e-6)
        adapted = name.endswith("_proj.weight") and "o_proj" not in name
        assert torch.equal(tensor, base[name]) != adapted, name
