"""The check of chat templates: each family, the forms that are exact for it, and what a run says."""

import logging
import subprocess
import sys
from pathlib import Path

import pytest

from skyrl_train.config import load_config
from skyrl_train.data.chat import ChatTemplate, check_messages
from skyrl_train.data.exactness import CALLED, FEATURES, TOOLS, Outcome
from skyrl_train.entrypoints.verify_template.before_run import check_conversations, findings
from skyrl_train.entrypoints.verify_template.program import main
from tests.support.realistic import FAMILIES, realistic_tokenizer
from tests.support.tiny import tiny_tokenizer

QUESTION = [{"role": "user", "content": "How many?"}]
REWRITTEN = {
    "chatml": set(),
    "qwen2_5": set(),
    "qwen3": {"thoughts"},
    "llama3": {"white space around responses"},
    "deepseek_r1": {feature.name for feature in FEATURES},
    "gemma": {"white space around responses"},
}
REJECTED = {
    "chatml": {"tool calls in the prompt"},
    "gemma": {"system message", "several observations", "tools, and their results", "tool calls in the prompt"},
}


def family(name):
    return ChatTemplate(realistic_tokenizer(name, 600), {})


def named(found, outcome):
    return {each.feature.name for each in found if each.outcome is outcome}


@pytest.mark.parametrize("name", FAMILIES)
def test_what_each_familys_template_does_to_appended_turns(name, tmp_path):
    found = list(findings(family(name), str(tmp_path)))
    assert named(found, Outcome.REWRITTEN) == REWRITTEN[name]
    assert named(found, Outcome.REJECTED) == REJECTED.get(name, set())
    assert not named(found, Outcome.WRONG) | named(found, Outcome.UNCLOSED)
    for each in found:  # a detail for each difference, with both texts
        assert bool(each.detail) == (each.outcome in (Outcome.REWRITTEN, Outcome.REJECTED))


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3"])
def test_tool_calls_are_rendered_as_transformers_does_also_with_arguments_as_text(name):
    chat = family(name).with_variables({"tools": TOOLS})
    messages = [*QUESTION, *CALLED]
    expected = chat.tokenizer.apply_chat_template(messages, tools=TOOLS, add_generation_prompt=True, return_dict=False)
    call = {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": 1, "b": 2}'}}
    openai = [*QUESTION, {"role": "assistant", "tool_calls": [call]}, {**CALLED[1], "tool_call_id": "1"}]
    assert chat.prompt_ids(check_messages(messages)) == expected
    assert chat.prompt_ids(check_messages(openai)) == expected


@pytest.mark.parametrize("calls", ["add(1, 2)", [{"function": {"name": "add"}}], [{"name": 1, "arguments": {}}], [3]])
def test_tool_calls_of_another_form_are_refused(calls):
    with pytest.raises(ValueError, match="`tool_calls` of message 0 must be a list of"):
        check_messages([{"role": "assistant", "content": "", "tool_calls": calls}])


def config(*overrides):
    return load_config(["generator.max_turns=2", *overrides])


def test_a_run_whose_template_drops_thoughts_is_warned_with_the_key(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        check_conversations(config(), family("qwen3"), str(tmp_path), QUESTION)
    assert "earlier turns with thoughts differently" in caplog.text
    assert "generator.step_wise_trajectories=true" in caplog.text
    caplog.clear()
    for key in ("step_wise_trajectories=true", "use_conversation_multi_turn=false"):
        check_conversations(config(f"generator.{key}"), family("qwen3"), str(tmp_path), QUESTION)
    check_conversations(config(), family("qwen2_5"), str(tmp_path), QUESTION)
    assert not caplog.records


def test_a_run_whose_turns_end_with_another_token_than_the_templates_is_refused(tmp_path):
    """A base model with a chat template: the engine ends responses at <|endoftext|>, and <|im_end|> would follow it."""
    chat = family("qwen2_5")
    chat.tokenizer.eos_token = "<|endoftext|>"
    with pytest.raises(ValueError, match=r"step_wise_trajectories=true; if the tokenizer's eos_token"):
        check_conversations(config(), chat, str(tmp_path), QUESTION)
    for key in ("step_wise_trajectories=true", "use_conversation_multi_turn=false"):
        check_conversations(config(f"generator.{key}"), chat, str(tmp_path), QUESTION)
    end = chat.tokenizer.convert_tokens_to_ids("<|im_end|>")
    Path(tmp_path, "generation_config.json").write_text(f'{{"eos_token_id": [{end}]}}')
    check_conversations(config(), chat, str(tmp_path), QUESTION)  # engines also stop at <|im_end|>


def test_a_template_that_rejects_a_second_turn_is_refused_with_the_form_that_needs_none(tmp_path):
    chat = family("chatml")
    chat.tokenizer.chat_template = "{{ raise_exception('one turn') if messages | length > 1 else messages[0].content }}"
    for key in ("step_wise_trajectories=true", "step_wise_trajectories=false"):
        with pytest.raises(ValueError, match="one turn.*use_conversation_multi_turn=false"):
            check_conversations(config(f"generator.{key}"), chat, str(tmp_path), QUESTION)
    check_conversations(config("generator.use_conversation_multi_turn=false"), chat, str(tmp_path), QUESTION)


def test_a_template_without_an_end_of_turn_may_be_trained_with_a_warning(tmp_path, caplog):
    chat = ChatTemplate(tiny_tokenizer(), {})
    check_conversations(config("generator.step_wise_trajectories=true"), chat, str(tmp_path), QUESTION)
    assert not caplog.records
    check_conversations(config(), chat, str(tmp_path), QUESTION)
    (warning,) = caplog.messages
    assert "does not end turns" in warning and "step_wise_trajectories=true renders each turn" in warning
    assert "plain text" in named(findings(chat, str(tmp_path)), Outcome.UNCLOSED)


def verify(tmp_path, name, *overrides):
    realistic_tokenizer(name, 600).save_pretrained(tmp_path)
    return main([f"trainer.policy.model.path={tmp_path}", *overrides])


def test_the_command_shows_the_difference_and_its_code_is_that_of_the_configured_form(tmp_path, capsys):
    assert verify(tmp_path, "qwen3") == 1
    printed = " ".join(capsys.readouterr().out.split())
    assert "thoughts │ rewritten │ exact │ exact" in printed
    assert r"thoughts: the request has 'im_start|>assistant\n<think>\nwhat\n</think>" in printed
    assert "not exact for the form of this configuration, append: thoughts" in printed
    assert verify(tmp_path, "qwen3", "generator.step_wise_trajectories=true") == 0
    assert verify(tmp_path, "qwen3", "generator.use_conversation_multi_turn=false") == 0
    assert "exact for the form of this configuration: one message" in capsys.readouterr().out
    assert verify(tmp_path, "chatml") == 0


def test_the_command_says_what_is_missing(tmp_path, capsys):
    assert main([f"trainer.policy.model.path={tmp_path}"]) == 2
    assert "has no tokenizer" in " ".join(capsys.readouterr().err.split())
    assert main(["--help"]) == 0 and "verify_template" in capsys.readouterr().out


def test_the_command_needs_no_ray():
    module = "skyrl_train.entrypoints.verify_template.program"
    code = f"import sys, {module}; print(sorted({{'ray', 'vllm'}} & {{*sys.modules}}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout.strip() == "[]"
