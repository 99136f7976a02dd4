"""Check Dockerfiles without a Docker engine: `python docker/check/check_docker.py [FILE ...]`.

Prints `FILE:LINE: RULE problem` and exits with code 1 if there is any. With --packages, the names that apt-get installs
are looked up with this machine's apt-cache, whose distribution may differ from the image's.
"""

from __future__ import annotations

import argparse
import fnmatch
import itertools
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from dockerfile import Instruction, parse

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Image:
    """A Dockerfile, its instructions and the folder that it is built from."""

    instructions: Sequence[Instruction]
    context: Path

    def named(self, *names: str) -> list[Instruction]:
        return [instruction for instruction in self.instructions if instruction.name in names]

    @property
    def last_stage(self) -> list[Instruction]:
        starts = [index for index, one in enumerate(self.instructions) if one.name == "FROM"]
        return list(self.instructions[starts[-1] :]) if starts else list(self.instructions)


Finding = tuple[int, str]
LAYERS = {"apt-get": "apt", "apt": "apt", "useradd": "user", "adduser": "user"}
RULES: dict[str, Callable[[Image], Iterator[Finding]]] = {}


def rule(check: Callable[[Image], Iterator[Finding]]) -> Callable[[Image], Iterator[Finding]]:
    RULES[check.__name__.replace("_", "-")] = check
    return check


@rule
def pinned_base(image: Image) -> Iterator[Finding]:
    stages: set[str] = set()
    if not image.named("FROM"):
        yield 1, "there is no FROM"
    for one in image.named("FROM"):
        words = one.value.split()
        base = words[0]
        tag = base.rpartition("/")[2].partition(":")[2]
        if base not in stages and base != "scratch" and "@sha256:" not in base:
            if not tag:
                yield one.line, f"{base} has no tag: give one that names a version"
            elif tag == "latest" or not re.search(r"\d+\.\d+\.\d+", tag):
                yield one.line, f"{base} moves: give a tag with a whole version such as 1.2.3"
        if len(words) == 3:
            stages.add(words[2])


@rule
def pip_keeps_no_cache(image: Image) -> Iterator[Finding]:
    for line, words in _pip_calls(image):
        if words[0] in ("install", "wheel", "download") and "--no-cache-dir" not in words:
            yield line, "pip without --no-cache-dir leaves its downloads in the layer"


@rule
def pip_has_versions(image: Image) -> Iterator[Finding]:
    for line, words in _pip_calls(image):
        for word in _packages(words, ("--extra-index-url", "--index-url", "-i", "-r", "-c", "--find-links")):
            if words[0] == "install" and not re.search(r"[=<>~]=|[<>@]|^\.|/|\.whl$|\$", word):
                yield line, f"pip install {word}: give a version or a bound"


@rule
def apt_leaves_nothing(image: Image) -> Iterator[Finding]:
    for one in image.named("RUN"):
        commands = one.commands
        if ["apt-get", "update"] in [command[:2] for command in commands]:
            if not any(command[0] == "rm" and "/var/lib/apt/lists/*" in command for command in commands):
                yield one.line, "apt-get update leaves its lists: end the same RUN with rm -rf /var/lib/apt/lists/*"
            if not any(command[0] == "apt-get" and "install" in command for command in commands):
                yield one.line, "apt-get update alone in a layer goes stale: install in the same RUN"


@rule
def apt_asks_nothing(image: Image) -> Iterator[Finding]:
    for one in image.named("RUN"):
        for command in one.commands:
            if command[0] == "apt":
                yield one.line, "apt is for people: apt-get"
            if command[0] != "apt-get" or "install" not in command:
                continue
            if not {"-y", "--yes"} & set(command):
                yield one.line, "apt-get install waits for an answer: --yes"
            if "--no-install-recommends" not in command:
                yield one.line, "apt-get install brings recommended packages: --no-install-recommends"
            packages = apt_packages(command)
            if packages != sorted(packages):
                yield one.line, f"sort the packages, so that a double is seen: {' '.join(sorted(packages))}"


@rule
def no_upgrade(image: Image) -> Iterator[Finding]:
    for one in image.named("RUN"):
        for command in one.commands:
            if command[0] == "apt-get" and {"upgrade", "dist-upgrade"} & set(command):
                yield one.line, "an upgrade makes the image depend on the day: take a newer base"


@rule
def no_sudo_or_launcher(image: Image) -> Iterator[Finding]:
    for one in image.named("RUN", "CMD", "ENTRYPOINT"):
        for command in [one.exec_form] if one.exec_form else one.commands:
            if command[0] in ("sudo", "uv", "conda", "poetry"):
                yield one.line, f"{command[0]}: install with pip for the system's Python, which every program finds"


@rule
def one_idea_per_layer(image: Image) -> Iterator[Finding]:
    for one in image.named("RUN"):
        kinds = {LAYERS[command[0]] for command in one.commands if command[0] in LAYERS}
        if any(line == one.line for line, _ in _pip_calls(image)):
            kinds.add("pip")
        if len(kinds) > 1:
            yield one.line, f"{' and '.join(sorted(kinds))} in one RUN: a change of one makes the other anew"


@rule
def pipes_fail(image: Image) -> Iterator[Finding]:
    pipefail = False
    for one in image.instructions:
        if one.name == "FROM":
            pipefail = False
        if one.name == "SHELL":
            pipefail = "pipefail" in (one.exec_form or [])
        if one.name == "RUN" and one.has_pipe and not pipefail:
            yield one.line, 'a failure before the pipe is lost: SHELL ["/bin/bash", "-o", "pipefail", "-c"] before it'


@rule
def runs_as_a_user(image: Image) -> Iterator[Finding]:
    users = [one for one in image.last_stage if one.name == "USER"]
    if not users:
        yield image.instructions[-1].line, "no USER: the container would run as root"
    elif users[-1].value.split(":")[0] in ("root", "0"):
        yield users[-1].line, "the last USER is root"


@rule
def exec_form(image: Image) -> Iterator[Finding]:
    for one in image.named("ENTRYPOINT", "CMD", "SHELL"):
        if one.exec_form is None:
            yield one.line, f'{one.name} through a shell does not get signals: write ["program", "argument"]'
    for name in ("ENTRYPOINT", "CMD"):
        for one in [one for one in image.last_stage if one.name == name][1:]:
            yield one.line, f"a second {name}: only the last one counts"


@rule
def no_add(image: Image) -> Iterator[Finding]:
    for one in image.named("ADD"):
        yield one.line, "ADD fetches and unpacks by surprise: COPY, or a RUN that checks what it fetched"


@rule
def absolute_workdir(image: Image) -> Iterator[Finding]:
    for one in image.named("WORKDIR"):
        if not one.value.startswith(("/", "$")):
            yield one.line, f"WORKDIR {one.value} depends on the one before: give the whole path"
    for one in image.named("RUN"):
        if one.commands and one.commands[0][0] == "cd":
            yield one.line, "cd ends with its RUN: WORKDIR"


@rule
def copies_what_is_there(image: Image) -> Iterator[Finding]:
    for one in image.named("COPY"):
        if "from" in one.flags:
            continue
        for source in one.value.split()[:-1]:
            if source in (".", "./", "*"):
                yield one.line, f"COPY {source} takes the whole folder: name what the image needs"
            elif not list(image.context.glob(source.removeprefix("./"))):
                yield one.line, f"COPY {source}: there is no such file in {image.context}"
            elif _is_ignored(source.removeprefix("./"), image.context / ".dockerignore"):
                yield one.line, f"COPY {source}: .dockerignore keeps it from the builder"


@rule
def no_secret_or_model(image: Image) -> Iterator[Finding]:
    for one in image.named("ARG", "ENV"):
        for name in one.assignments:
            if re.search(r"TOKEN|PASSWORD|SECRET|API_KEY", name.upper()):
                yield (
                    one.line,
                    f"{name} stays readable in the image: give it to `docker run`, or to RUN as a mounted secret",
                )
    for one in image.named("RUN"):
        if re.search(r"snapshot_download|hf download|huggingface-cli|from_pretrained|load_dataset", one.value):
            yield one.line, "no model and no data in the image: mount them"


def _pip_calls(image: Image) -> Iterator[tuple[int, list[str]]]:
    """(line, words after `pip`) of every call."""
    for one in image.named("RUN"):
        for command in one.commands:
            if re.fullmatch(r"pip[\d.]*", command[0]):
                yield one.line, command[1:] or [""]
            elif re.fullmatch(r"python[\d.]*", command[0]) and command[1:3] == ["-m", "pip"]:
                yield one.line, command[3:] or [""]


def _packages(words: Sequence[str], with_value: Sequence[str] = ()) -> list[str]:
    """What follows the subcommand and is neither an option nor the value of one of `with_value`."""
    taken = set(with_value)
    return [word for before, word in itertools.pairwise(words) if word[0] != "-" and before not in taken]


def apt_packages(command: Sequence[str]) -> list[str]:
    """Of one `apt-get ... install ...`."""
    return _packages(command[command.index("install") :])


def _is_ignored(path: str, ignore: Path) -> bool:
    """Whether .dockerignore's last pattern that fits `path` or a folder above leaves it out."""
    ignored = False
    parents = [path, *(str(parent) for parent in Path(path).parents if str(parent) != ".")]
    for line in ignore.read_text().splitlines() if ignore.is_file() else []:
        pattern = line.strip()
        if (
            pattern
            and pattern[0] != "#"
            and any(fnmatch.fnmatch(one, pattern.lstrip("!/").rstrip("/")) for one in parents)
        ):
            ignored = pattern[0] != "!"
    return ignored


def check(text: str, context: Path) -> list[str]:
    """`LINE: RULE what is wrong` for each finding, in the file's order."""
    try:
        image = Image(parse(text), context)
    except ValueError as error:
        return [f"1: parse {error}"]
    found = [(line, name, message) for name, look in RULES.items() for line, message in look(image)]
    return [f"{line}: {name} {message}" for line, name, message in sorted(found)]


def unknown_packages(text: str) -> list[str]:
    """Packages of apt-get lines that this machine's apt-cache does not know."""
    commands = [command for one in parse(text) if one.name == "RUN" for command in one.commands]
    installs = [command for command in commands if command[0] == "apt-get" and "install" in command]
    names = {name for command in installs for name in apt_packages(command)}
    known = subprocess.run(["apt-cache", "pkgnames"], check=True, capture_output=True, text=True).stdout.split()
    return sorted(names - set(known))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("files", nargs="*", type=Path, default=sorted((ROOT / "docker").glob("Dockerfile*")))
    parser.add_argument("--packages", action="store_true", help="look names of packages up with apt-cache")
    options = parser.parse_args()
    if options.packages and shutil.which("apt-cache") is None:
        parser.error("--packages needs apt-cache, which is not here")
    failed = False
    for file in options.files:
        findings = check(file.read_text(), ROOT)
        if options.packages:
            findings += [f"1: apt-cache does not know {name}" for name in unknown_packages(file.read_text())]
        failed = failed or bool(findings)
        print("\n".join(f"{file}:{finding}" for finding in findings) or f"{file}: {len(RULES)} rules hold")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
