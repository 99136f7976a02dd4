"""An environment whose rewards a model gives: a judge behind a server with OpenAI's API."""

import json
import os
import re
from typing import Any
from urllib.request import Request, urlopen

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput

OPENAI = "https://api.openai.com/v1"
TIMEOUT_S = 60
INSTRUCTION = """\
Grade the answer of a pupil. The last line of your reply is "grade: N", with N from 0 (useless) to 10 (equal to the
reference).

question: {question}
reference: {reference}
answer: {answer}
"""


class JudgeEnv(BaseTextEnv):
    """One turn, graded by the judge. Settings: `base_url` of its server (up to /v1, by default OpenAI), and `model`.

    A judge that cannot be reached or gives no grade is an error, not a reward of 0: the run repeats, leaves out or
    reports it (generator.max_failed_share).
    """

    def __init__(self, env_config: Any, extras: dict[str, Any]) -> None:
        super().__init__()
        self.url = f"{env_config.base_url or OPENAI}/chat/completions"
        self.model = env_config.model
        self.reference = extras["reward_spec"]["ground_truth"]
        self.num_characters = 0

    def init(self, prompt: list[dict[str, str]]) -> tuple[list[dict[str, str]], dict[str, Any]]:
        self.question = prompt[-1]["content"]
        return prompt, {}

    def step(self, action: str) -> BaseTextEnvStepOutput:
        reply = self.ask(INSTRUCTION.format(question=self.question, reference=self.reference, answer=action))
        self.num_characters = len(reply)
        found = re.findall(r"^grade: (10|\d)$", reply, re.MULTILINE)
        if not found:
            raise ValueError(f"the judge gave no grade: {reply!r}")
        return BaseTextEnvStepOutput(observations=[], reward=int(found[-1]) / 10, done=True, metadata={})

    def ask(self, text: str) -> str:
        body = {"model": self.model, "messages": [{"role": "user", "content": text}], "temperature": 0}
        headers = {
            "Content-Type": "application/json",
            "Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}",
        }
        with urlopen(Request(self.url, json.dumps(body).encode(), headers), timeout=TIMEOUT_S) as answer:
            return json.load(answer)["choices"][0]["message"]["content"]

    def get_metrics(self) -> dict[str, float]:
        return {"judge_characters": self.num_characters}
