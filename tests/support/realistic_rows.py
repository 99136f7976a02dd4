"""Rows with the columns of public data sets, what a policy may answer to them, and what their environments need."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

Row = dict[str, Any]

GSM8K: list[Row] = [
    {
        "question": f"Ann has {n} apples and buys 2. How many has she?",
        "answer": f"{n}+2=<<{n}+2={n + 2}>>\n#### {n + 2}",
    }
    for n in range(4, 12)
]
DAPO: list[Row] = [
    {
        "prompt": f"What is ${n}^2$?",
        "solution": str(n * n),
        "data_source": "math_dapo",
        "ability": "MATH",
        "reward_model": {"ground_truth": str(n * n), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(n)},
    }
    for n in range(4, 12)
]
SEARCH: list[Row] = [
    {
        "id": f"train_{n}",
        "question": f"What is the capital of country {n}?",
        "golden_answers": [f"City {n}"],
        "data_source": "nq",
        "prompt": [{"role": "user", "content": f"Search between <search> and </search>. The capital of country {n}?"}],
        "ability": "fact-reasoning",
        "reward_model": {"ground_truth": {"target": [f"City {n}"]}, "style": "rule"},
    }
    for n in range(8)
]
SQL: list[Row] = [
    {
        "prompt": [{"role": "user", "content": f"How many singers are older than {n}? SQL between <sql> and </sql>"}],
        "env_class": "text2sql",
        "db_id": "concert",
        "data": "spider",
        "reward_spec": {"method": "rule", "ground_truth": f"SELECT count(*) FROM singer WHERE age > {n}"},
    }
    for n in range(20, 28)
]
CHAT: list[Row] = [
    {
        "prompt": f"Tell me about number {n}",
        "messages": [
            {"role": "user", "content": f"Tell me about number {n}"},
            {"role": "assistant", "content": f"It follows {n - 1}."},
            {"role": "user", "content": "And then?"},
            {"role": "assistant", "content": f"Then comes {n + 1}."},
        ],
    }
    for n in range(8)
]


def gsm8k(asked: str, is_right: bool) -> str:
    """Args: asked: text of the conversation so far."""
    return f"I think.\n#### {_number(asked, 'Ann has ') + 2 if is_right else 1}"


def dapo(asked: str, is_right: bool) -> str:
    return f"I think.\nAnswer: {_number(asked, 'What is $') ** 2 if is_right else 1}"


def search(asked: str, is_right: bool) -> str:
    if "Doc 1" not in asked:
        return "<think>I do not know</think><search>capital</search>"
    return f"<answer>City {_number(asked, 'capital of country ') if is_right else 99}</answer>"


def sql(asked: str, is_right: bool) -> str:
    if "<observation>" not in asked:
        return "<think>I look</think><sql>SELECT name, age FROM singer</sql>"
    age = _number(asked, "older than ") if is_right else 0
    return f"<think>I know</think><solution>SELECT count(*) FROM singer WHERE age > {age}</solution>"


def _number(text: str, before: str) -> int:
    digits = text.rpartition(before)[2]
    return int(digits[: next(i for i, c in enumerate(digits) if not c.isdigit())])


def write_rows(rows: list[Row], path: Path) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_database(folder: Path) -> None:
    """`spider/database/concert/concert.sqlite` with ten singers, aged 20 to 29."""
    path = folder / "spider/database/concert/concert.sqlite"
    path.parent.mkdir(parents=True)
    with sqlite3.connect(path) as connection:
        connection.execute("CREATE TABLE singer (name TEXT, age INTEGER)")
        connection.executemany("INSERT INTO singer VALUES (?, ?)", [(f"Singer {n}", 20 + n) for n in range(10)])
    connection.close()


class _Retriever(BaseHTTPRequestHandler):
    queries: list[Row]

    def do_POST(self) -> None:
        query = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.queries.append(query)
        found = [{"document": {"contents": f"Country {n}\nCity {n}"}, "score": 1.0} for n in range(query["topk"])]
        body = json.dumps({"result": [found]}).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None: ...


@contextmanager
def retriever() -> Iterator[tuple[str, list[Row]]]:
    """The address of a search engine on this machine, and the queries that it has answered."""
    handler = type("Retriever", (_Retriever,), {"queries": []})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/retrieve", handler.queries  # type: ignore[attr-defined]
    finally:
        server.shutdown()
        server.server_close()
