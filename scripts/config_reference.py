"""Writes docs/configuration.md and docs/sft_configuration.md from the base YAMLs (value, comment) and the dataclasses
(type, what is allowed).

python scripts/config_reference.py            writes the files
python scripts/config_reference.py --check    fails where one is out of date
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import re
import sys
import typing
from pathlib import Path

from skyrl_train.config import Config
from skyrl_train.config.schema import field_types, rules, type_name
from skyrl_train.config.sft import SftConfig

ROOT = Path(__file__).parents[1]
CONFIGS, DOCS = ROOT / "configs", ROOT / "docs"
HEAD = """# Configuration

Every key, its type and its value in `configs/ppo_base_config.yaml`. Written by `scripts/config_reference.py`; change
the YAML or the dataclasses of `skyrl_train/config` and run it again.

```
python -m skyrl_train.entrypoints.main_base [+experiment=NAME] [key=value ...]
```

| on the command line | meaning |
|---|---|
| `+experiment=NAME` | lay `experiment/NAME.yaml` over the base |
| `key=value` | set a key, after the experiment: `trainer.logger=[console,wandb]`, `trainer.prepare=null` |
| `--config-dir DIR` | find experiments in `DIR/experiment/` too; so does Hydra's `hydra.searchpath=[file:///DIR]` |
| `--config-file FILE` | start from a complete file instead of the base, such as the `config.yaml` of a run |
| `--cfg job` | print the configuration that would be used, and stop |
| `--help` | the same in short |

An experiment of your own is a file `configs/experiment/NAME.yaml` in the folder you start from (or in `--config-dir`).
It holds only what differs from the base, and its first line is `# @package _global_`. It may build on another with
`defaults: [quickstart, _self_]`. A name that is taken by a shipped experiment is refused.

An unknown key, a wrong type or a value that is not allowed is an error that names the key, the place it was written and
the nearest right one. Keys whose type is "mapping" take any key below them:
`generator.engine_init_kwargs.block_size=32`.
One value stands for a list of one. A text that looks like a number needs quotes: `trainer.run_name="'7'"`.
"""
SFT_HEAD = """# Configuration of supervised fine-tuning

Every key, its type and its value in `configs/sft_base_config.yaml`, which is laid over `configs/ppo_base_config.yaml`.
Written by `scripts/config_reference.py`. [sft.md](sft.md) says how to use it.

```
python -m skyrl_train.entrypoints.main_sft [+experiment=NAME] [key=value ...]
```

Command line, experiments and errors are those of [configuration.md](configuration.md).
"""


COLUMNS = ("| key | type | value | meaning |", "|---|---|---|---|")


def lines(text: str) -> dict[str, tuple[str, str]]:
    """Dotted key of the YAML -> (value, comment) as they are written; a section has the value ""."""
    found: dict[str, tuple[str, str]] = {}
    path: list[str] = []
    for line in text.splitlines():
        match = re.match(r"( *)(\w+):(.*)", line)
        if match is not None:
            path[len(match[1]) // 2 :] = [match[2]]
            value, _, comment = match[3].partition(" #")
            found[".".join(path)] = (value.strip(), comment.strip())
    return found


def docstrings(section: type) -> dict[str, str]:
    """Field -> the line under it in the source, of the class and of those it builds on."""
    found: dict[str, str] = {}
    for kind in section.__mro__:
        if not dataclasses.is_dataclass(kind):
            continue
        (tree,) = ast.parse(inspect.getsource(kind)).body
        assert isinstance(tree, ast.ClassDef)
        for field, text in zip(tree.body, tree.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found.setdefault(ast.unparse(field.target), str(text.value.value))
    return found


def table(section: type, path: str, written: dict[str, tuple[str, str]]) -> list[str]:
    """Markdown of one section and of those within it."""
    out = [f"## {path}", "", inspect.getdoc(section) or "", ""]
    if written[path][0].startswith("*"):
        return [*out, "Keys, types and values are those of `trainer.policy.megatron_config`.", ""]
    said = docstrings(section)
    inner: list[str] = []
    rows = []
    for name, kind in field_types(section).items():
        if dataclasses.is_dataclass(kind):
            inner += table(typing.cast(type, kind), f"{path}.{name}", written)
            continue
        rows.append(row(name, kind, *written[f"{path}.{name}"], said))
    if rows:
        out += [*COLUMNS, *rows, ""]
    return out + inner


def row(name: str, kind: typing.Any, value: str, comment: str, said: dict[str, str]) -> str:
    """Markdown of one key. Args: said: what the source says of the fields, for keys without a comment."""
    allowed = "".join(f", {rule}" for rule in rules(kind)[:1])
    return f"| `{name}` | {type_name(kind)}{allowed} | `{value}` | {comment or said[name]} |"


def reference(head: str, schema: type, *bases: str) -> str:
    """One whole file; a later base is laid over the ones before it."""
    written: dict[str, tuple[str, str]] = {}
    for base in bases:
        over = lines((CONFIGS / base).read_text())
        # A value of another program needs the words of its own only where they differ.
        written |= {key: (value, comment or written.get(key, ("", ""))[1]) for key, (value, comment) in over.items()}
    kinds, said = field_types(schema), docstrings(schema)
    sections = [name for name, kind in kinds.items() if dataclasses.is_dataclass(kind)]
    rows = [row(name, kind, *written[name], said) for name, kind in kinds.items() if name not in sections]
    body = [line for name in sections for line in table(kinds[name], name, written)]
    body += ["## Keys without a section", "", *COLUMNS, *rows]
    return head + "\n" + "\n".join(body).rstrip() + "\n"


def main(check: bool) -> int:
    """Exit code."""
    references = {
        DOCS / "configuration.md": reference(HEAD, Config, "ppo_base_config.yaml"),
        DOCS / "sft_configuration.md": reference(SFT_HEAD, SftConfig, "ppo_base_config.yaml", "sft_base_config.yaml"),
    }
    for path, text in references.items():
        if not check:
            path.write_text(text)
        elif not path.is_file() or path.read_text() != text:
            print(f"error: {path.relative_to(ROOT)} is out of date: run python scripts/config_reference.py")
            return 1
    return 0


if __name__ == "__main__":
    sys.exit(main("--check" in sys.argv[1:]))
