"""The Dockerfiles keep the rules of docker/check/check_docker.py, and each rule finds its fault."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[3]
FILES = sorted((ROOT / "docker").glob("Dockerfile*"))
GOOD = r"""
FROM python:3.11.13-slim-bookworm
SHELL ["/bin/bash", "-o", "pipefail", "-c"]
RUN apt-get update \
    # a comment between continued lines
    && apt-get install --yes --no-install-recommends gcc tini \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /opt/app
COPY pyproject.toml ./
RUN python -m pip install --no-cache-dir ".[cpu]" "ninja>=1.11"
RUN cat pyproject.toml | wc -l || true
USER app
ENTRYPOINT ["/usr/bin/tini", "--"]
CMD ["python"]
"""


def script(name: str) -> ModuleType:
    sys.path.insert(0, str(ROOT / "docker" / "check"))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(ROOT / "docker" / "check"))


@pytest.fixture(scope="module")
def lint() -> ModuleType:
    return script("check_docker")


@pytest.fixture(scope="module")
def dockerfile() -> ModuleType:
    return script("dockerfile")


def test_there_is_an_image_with_gpus_and_one_without():
    assert [path.name for path in FILES] == ["Dockerfile", "Dockerfile.cpu"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_build_files_keep_every_rule(lint: ModuleType, path: Path):
    assert lint.check(path.read_text(), ROOT) == []


def test_a_good_build_file_has_no_findings(lint: ModuleType):
    assert lint.check(GOOD, ROOT) == []


@pytest.mark.parametrize(
    ("rule", "old", "new"),
    [
        ("pinned-base", ":3.11.13-slim-bookworm", ""),
        ("pinned-base", ":3.11.13-slim-bookworm", ":latest"),
        ("pinned-base", ":3.11.13-slim-bookworm", ":3.11-slim"),
        ("pinned-base", "python:3.11.13-slim-bookworm", "host:5000/python"),
        ("pip-keeps-no-cache", "--no-cache-dir ", ""),
        ("pip-has-versions", '"ninja>=1.11"', "ninja"),
        ("apt-leaves-nothing", " \\\n    && rm -rf /var/lib/apt/lists/*", ""),
        ("apt-leaves-nothing", "&& apt-get install --yes --no-install-recommends gcc tini", ""),
        ("apt-asks-nothing", " --yes", ""),
        ("apt-asks-nothing", " --no-install-recommends", ""),
        ("apt-asks-nothing", "gcc tini", "tini gcc"),
        ("apt-asks-nothing", "&& apt-get install", "&& apt install"),
        ("no-upgrade", "&& apt-get install", "&& apt-get upgrade --yes && apt-get install"),
        ("no-sudo-or-launcher", '["python"]', '["uv", "run", "python"]'),
        ("no-sudo-or-launcher", "RUN python", "RUN sudo python"),
        ("one-idea-per-layer", "RUN python", "RUN useradd app && python"),
        ("pipes-fail", ', "-o", "pipefail"', ""),
        ("pipes-fail", "WORKDIR /opt", "FROM debian:12.1.0\nWORKDIR /opt"),
        ("runs-as-a-user", "USER app\n", ""),
        ("runs-as-a-user", "USER app", "USER root"),
        ("runs-as-a-user", "USER app", "USER app\nUSER 0:0"),
        ("exec-form", '["python"]', "python"),
        ("exec-form", '["python"]', '["python"]\nCMD ["bash"]'),
        ("no-add", "COPY pyproject.toml", "ADD https://host.example/archive.tgz"),
        ("absolute-workdir", "/opt/app", "opt/app"),
        ("absolute-workdir", "RUN python", "RUN cd /opt && python"),
        ("copies-what-is-there", "COPY pyproject.toml", "COPY requirements.txt"),
        ("copies-what-is-there", "COPY pyproject.toml", "COPY ."),
        ("copies-what-is-there", "COPY pyproject.toml", "COPY tests"),
        ("no-secret-or-model", "USER app", "ENV HF_TOKEN=secret\nUSER app"),
        ("no-secret-or-model", "RUN python", "RUN hf download org/model && python"),
        ("parse", "RUN cat", "RNU cat"),
        ("parse", 'CMD ["python"]', "RUN python \\"),
    ],
)
def test_each_rule_sees_its_fault(lint: ModuleType, rule: str, old: str, new: str):
    assert GOOD.count(old) >= 1
    findings = lint.check(GOOD.replace(old, new, 1), ROOT)
    assert rule in [finding.split()[1] for finding in findings], findings


def test_findings_name_the_line_on_which_the_instruction_begins(lint: ModuleType):
    assert lint.check(GOOD.replace(" --yes", ""), ROOT)[0].startswith("4: apt-asks-nothing ")


def test_commands_of_a_condition_are_seen_and_assignments_before_a_command_are_not(dockerfile: ModuleType):
    text = """FROM a\nRUN if [ "$A" = true ]; then X=1 pip install b; fi && (c | d) || e"""
    run = dockerfile.parse(text)[1]
    assert run.commands == [["[", "$A", "=", "true", "]"], ["pip", "install", "b"], ["c"], ["d"], ["e"]]
    assert run.has_pipe


def test_variables_are_put_in_as_the_builder_does(dockerfile: ModuleType):
    variables = {"A": "1", "EMPTY": ""}
    assert dockerfile.substitute("$A ${A}b ${EMPTY:-2} $NONE.", variables) == "1 1b 2 ."


def test_steps_that_start_nothing_leave_what_the_builder_would(dockerfile: ModuleType, tmp_path: Path):
    container = script("run_docker").Container(tmp_path, {"GIVEN": "2"}, {})
    text = """
        FROM a
        ARG GIVEN=1
        ARG KEPT=3
        ENV FOLDER=/opt/$GIVEN LAST=${KEPT}
        WORKDIR $FOLDER
        COPY LICENSE pyproject.toml ./
        COPY configs ./configs
        USER 7
        CMD ["b", "$KEPT"]
    """
    for one in dockerfile.parse(text.replace(8 * " ", "")):
        container.step(one)
    assert (container.environment["LAST"], container.user, container.command) == ("3", "7", ["b", "$KEPT"])
    assert sorted(path.name for path in (tmp_path / "opt" / "2").iterdir()) == ["LICENSE", "configs", "pyproject.toml"]
    assert (tmp_path / "opt" / "2" / "configs" / "ppo_base_config.yaml").is_file()


def test_the_image_is_started_and_checked_as_its_steps_left_it(
    dockerfile: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    run_docker, commands = script("run_docker"), []
    monkeypatch.setattr(run_docker.Container, "execute", lambda self, command: commands.append(command))
    steps = dockerfile.parse('SHELL ["bash", "-c"]\nENTRYPOINT ["tini", "--"]\nCMD ["a"]\n')
    assert run_docker.build(run_docker.Container(tmp_path, {}, {}), steps, ["b --c"])
    assert commands == [["tini", "--", "a"], ["tini", "--", "bash", "-c", "b --c"]]


def test_what_the_cpu_image_uninstalls_is_what_the_set_up_script_leaves_out(dockerfile: ModuleType):
    instructions = dockerfile.parse((ROOT / "docker" / "Dockerfile.cpu").read_text())
    version = re.match(r"python:(\d+\.\d+)\.", instructions[0].value)
    assert version is not None
    environment = {"python_version": version[1], "sys_platform": "linux"}
    lines = re.findall(r"^\w+ ;.*$", (ROOT / "scripts" / "left_out.txt").read_text(), re.MULTILINE)
    asked = [Requirement(line) for line in lines]
    left_out = {one.name for one in asked if one.marker is not None and not one.marker.evaluate(environment)}
    commands = [command for one in instructions if one.name == "RUN" for command in one.commands]
    [uninstall] = [command for command in commands if command[3:4] == ["uninstall"]]
    assert set(uninstall[5:]) == left_out >= {"torchvision", "torchaudio", "torchcodec"}


@pytest.mark.parametrize(("name", "extra"), [("Dockerfile", "gpu"), ("Dockerfile.cpu", "cpu")])
def test_images_install_extras_that_exist_for_a_python_that_is_supported(dockerfile: ModuleType, name: str, extra: str):
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    text = (ROOT / "docker" / name).read_text()
    [extras] = re.findall(r'"\.\[([\w,]+)\]"', text)
    assert extra in extras.split(",") and set(extras.split(",")) <= set(project["optional-dependencies"])
    [version] = set(re.findall(r"the system's Python (3\.\d+)", text))
    assert Requirement(f"a{project['requires-python']}").specifier.contains(f"{version}.1")


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return Path(next(WheelBuilder(str(ROOT)).build(directory=str(folder), versions=["standard"])))


def test_the_wheel_holds_every_configuration_and_nothing_beside_the_package(wheel: Path):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    configs = {f"skyrl_train/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert len(configs) > 3 and configs <= names
    assert "skyrl_train/entrypoints/main_base.py" in names
    assert {name.split("/")[0].split("-")[0] for name in names} == {"skyrl_train"}


@pytest.mark.parametrize("program", ["main_base", "main_sft"])
def test_programs_answer_from_the_wheel_in_a_folder_of_their_own(wheel: Path, tmp_path: Path, program: str):
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    environment = os.environ | {"PYTHONPATH": str(tmp_path / "site")}
    source = "import skyrl_train; print(skyrl_train.__file__)"
    answer = [sys.executable, "-c", source], [sys.executable, "-m", f"skyrl_train.entrypoints.{program}", "--help"]
    where, usage = (
        subprocess.run(command, check=True, capture_output=True, text=True, cwd=tmp_path, env=environment).stdout
        for command in answer
    )
    assert where.startswith(str(tmp_path))
    assert "experiment" in usage and program in usage
