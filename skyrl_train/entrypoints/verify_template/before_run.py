"""Whether the conversations of a run are rendered as its keys promise, and which key helps if not."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from skyrl_train.config import Config
from skyrl_train.config.generator import GeneratorConfig
from skyrl_train.data.chat import ChatTemplate
from skyrl_train.data.exactness import FEATURES, PLAIN, QUESTION, TOOLS, Feature, Finding, Outcome, eos_token_ids, probe
from skyrl_train.types import Message

log = logging.getLogger(__name__)
ONE_MESSAGE = "generator.use_conversation_multi_turn=false"
STEP_WISE = "generator.step_wise_trajectories=true"
CHECKED = ("plain text", "truncated responses", "white space around responses", "thoughts")
"""Features that any conversation may have; the others depend on the environment and the rows."""


def findings(
    chat: ChatTemplate, folder: str, features: Sequence[Feature] = FEATURES, question: Sequence[Message] = (QUESTION,)
) -> Iterator[Finding]:
    """`probe` with the tokens that end a response of the model in `folder`."""
    with_tools = chat.with_variables({"tools": TOOLS})
    return probe(lambda tools: with_tools if tools else chat, eos_token_ids(chat, folder), features, question)


def check_conversations(config: Config, chat: ChatTemplate, folder: str, question: Sequence[Message]) -> None:
    """Check the form of the conversations of a run with several turns; log what a served model would read instead.

    Args: question: messages of a row. Raises: ValueError if the policy would read tokens that no server makes, or the
        template rejects a second turn.
    """
    chosen = [feature for feature in FEATURES if feature.name in CHECKED]
    found = list(findings(chat, folder, chosen, question))
    if error := refusal(config.generator, found):
        raise ValueError(error)
    if not appends(config.generator):
        return
    if any(each.outcome is Outcome.UNCLOSED for each in found):
        log.warning(
            "the chat template does not end turns, so the sampled end-of-sequence token stays in the conversation, and "
            "the policy is trained on conversations that a server does not make: %s renders each turn as it does, or "
            "use a template that ends turns",
            STEP_WISE,
        )
    if names := [each.feature.name for each in found if each.outcome is Outcome.REWRITTEN]:
        log.warning(
            "the chat template renders earlier turns with %s differently, so the policy is trained on conversations "
            "that a server does not make of them: %s renders each turn as it does (python -m "
            "skyrl_train.entrypoints.verify_template shows the differences)",
            " or ".join(names),
            STEP_WISE,
        )


def appends(generator: GeneratorConfig) -> bool:
    """Whether turns are appended through the template."""
    return generator.use_conversation_multi_turn and not generator.step_wise_trajectories


def refusal(generator: GeneratorConfig, found: Sequence[Finding]) -> str | None:
    """Why a run of these keys must not start; None if it may."""
    if not generator.use_conversation_multi_turn:
        return None
    for finding in found:
        if finding.feature is PLAIN and generator.step_wise_trajectories and not finding.is_rendered:
            return f"generator.step_wise_trajectories is true: {finding.detail}. Use another template, or {ONE_MESSAGE}"
        if finding.feature is PLAIN and finding.outcome is Outcome.REJECTED:
            return (
                f"generator.max_turns is {generator.max_turns}: {finding.detail}. Use another template, {ONE_MESSAGE}"
            )
        if finding.outcome is Outcome.WRONG and not generator.step_wise_trajectories:
            return (
                f"generator.max_turns is {generator.max_turns}: turns with {finding.feature.name} are joined with "
                f"tokens that are not the chat template's ({finding.detail}). Set {STEP_WISE}; if the tokenizer's "
                "eos_token is not the one that ends a turn in the template, correct it in tokenizer_config.json"
            )
    return None
