"""Execute a Dockerfile's steps without a Docker engine, in a folder that stands in for its base image.

`python docker/check/run_docker.py docker/Dockerfile.cpu --root FOLDER`, as root on Linux. FOLDER holds the files of a
distribution (debootstrap, or an unpacked `docker export`) and stays as it is: what the steps write goes to an overlay
that is deleted. RUN is executed with the Dockerfile's own SHELL, USER, WORKDIR and variables. At the end ENTRYPOINT
with CMD, then each --check, are executed as the final user. What differs from a build: the base image is another, there
is one stage only, and network and devices are this machine's. docs/containers.md has the commands.
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from dockerfile import Instruction, parse, substitute

CONTEXT = Path(__file__).parents[2]
INSIDE = "RUN_DOCKER_INSIDE"
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


class StepFailed(Exception):
    pass


@dataclass
class Container:
    """What one instruction leaves to the next."""

    root: Path
    given: Mapping[str, str]  # --build-arg
    passed: Mapping[str, str]  # --env: for this machine's network, not in the image
    environment: dict[str, str] = field(default_factory=lambda: {"PATH": PATH})
    arguments: dict[str, str] = field(default_factory=dict)
    shell: list[str] = field(default_factory=lambda: ["/bin/sh", "-c"])
    workdir: str = "/"
    user: str = "root"
    entrypoint: list[str] = field(default_factory=list)
    command: list[str] = field(default_factory=list)

    def step(self, one: Instruction) -> None:
        variables = self.arguments | self.environment
        value = substitute(one.value, variables)
        match one.name:
            case "ARG":
                for name, default in one.assignments.items():
                    chosen = self.given.get(name, default)
                    if chosen is not None:
                        self.arguments[name] = substitute(chosen, variables)
            case "ENV":
                for name, text in one.assignments.items():
                    self.environment[name] = substitute(text or "", variables)
            case "SHELL":
                self.shell = one.exec_form or self.shell
            case "WORKDIR":
                self.workdir = value
                (self.root / value.lstrip("/")).mkdir(parents=True, exist_ok=True)
            case "USER":
                self.user = value
            case "COPY":
                self._copy(value.split(), one)
            case "RUN":
                self.execute([*self.shell, one.value], self.arguments)
            case "ENTRYPOINT" | "CMD":
                words = one.exec_form or [*self.shell, one.value]
                setattr(self, "entrypoint" if one.name == "ENTRYPOINT" else "command", words)
            case "FROM":
                pass
            case _:
                raise StepFailed(f"{one.name} is not done here")

    def _copy(self, words: Sequence[str], one: Instruction) -> None:
        if one.flags:
            raise StepFailed(f"COPY with {', '.join(one.flags)} is not done here")
        *sources, target = words
        folder = self.root / os.path.join(self.workdir, target).lstrip("/")
        for source in sources:
            path = CONTEXT / source
            if path.is_dir():
                kept = shutil.ignore_patterns("__pycache__", "*.pyc")
                shutil.copytree(path, folder, dirs_exist_ok=True, ignore=kept)
            else:
                to = folder / path.name if target.endswith("/") else folder
                to.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(path, to)

    def execute(self, command: Sequence[str], more: Mapping[str, str] | None = None) -> None:
        """Raises StepFailed unless it exits with 0."""
        setting = {"HOME": "/root"} | dict(self.passed) | dict(more or {}) | self.environment
        words = ["env", "-i", *(f"{name}={value}" for name, value in setting.items()), *command]
        inside = f"cd {shlex.quote(self.workdir)} && exec {shlex.join(words)}"
        # runuser would need a session; chroot looks the user's groups up in the root's own files.
        user = [] if self.user == "root" else [f"--userspec={self.user}"]
        code = subprocess.run(["chroot", *user, self.root, "/bin/sh", "-c", inside], env={"PATH": PATH}).returncode
        if code != 0:
            raise StepFailed(f"exit code {code}")

    def start(self) -> None:
        """What the image runs by itself."""
        self.execute([*self.entrypoint, *self.command])

    def check(self, text: str) -> None:
        """Run a command line in the image's own shell."""
        self.execute([*self.entrypoint, *self.shell, text])


def mount(root: Path, lower: Path, binds: Sequence[Path]) -> None:
    """An overlay of `lower` at `root`/merged with the devices of this machine; undone when the namespace ends."""
    for name in ("upper", "work", "merged"):
        (root / name).mkdir()
    layers = f"lowerdir={lower},upperdir={root / 'upper'},workdir={root / 'work'}"
    merged = root / "merged"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", layers, merged], check=True)
    subprocess.run(["mount", "-t", "proc", "proc", merged / "proc"], check=True)
    subprocess.run(["mount", "--rbind", "/dev", merged / "dev"], check=True)
    # A shared-memory folder of its own, as a container has: what steps leave there goes with them.
    subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", merged / "dev/shm"], check=True)
    for path in [*binds, Path("/etc/resolv.conf"), Path("/etc/hosts")]:
        target = merged / str(path).lstrip("/")
        if path.is_dir():
            target.mkdir(parents=True, exist_ok=True)
        else:
            target.parent.mkdir(parents=True, exist_ok=True)
            target.unlink(missing_ok=True)
            target.touch()
        subprocess.run(["mount", "--bind", path, target], check=True)


def build(container: Container, instructions: Sequence[Instruction], checks: Sequence[str]) -> bool:
    """Print a line for each step; whether all of them went well."""
    steps: list[tuple[str, Callable[[], None]]] = [
        *((f"line {one.line} {one.name}", partial(container.step, one)) for one in instructions),
        ("ENTRYPOINT CMD", container.start),
        *((f"check {text}", partial(container.check, text)) for text in checks),
    ]
    report: list[str] = []
    for name, do in steps:
        print(f"== {name}", flush=True)
        start = time.monotonic()
        try:
            do()
        except (StepFailed, OSError) as error:
            report.append(f"FAILED {name}: {error}")
            break
        report.append(f"ok {time.monotonic() - start:7.1f} s  {name}")
    print("\n".join(["", "== report", *report]))
    return len(report) == len(steps) and not report[-1].startswith("FAILED")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("file", type=Path)
    parser.add_argument("--root", type=Path, required=True, help="folder that stands in for the base image")
    parser.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    parser.add_argument(
        "--env", action="append", default=[], metavar="NAME[=VALUE]", help="of RUN steps, not of the image"
    )
    parser.add_argument("--bind", action="append", default=[], type=Path, help="of this machine, seen by the steps too")
    parser.add_argument("--check", action="append", default=[], metavar="COMMAND", help="run in the image in the end")
    options = parser.parse_args()
    if os.geteuid() != 0:
        parser.error("mounting an overlay needs root")
    if not (options.root / "bin/sh").exists():
        parser.error(f"--root {options.root} holds no distribution; docs/containers.md says how to make one")
    if INSIDE not in os.environ:
        # Mounts and processes of the steps end with this namespace, whatever happens.
        return _in_a_namespace_of_its_own(options.root.resolve().parent)
    folder = Path(os.environ[INSIDE])
    mount(folder, options.root.resolve(), options.bind)
    passed = dict(one.split("=", 1) if "=" in one else (one, os.environ[one]) for one in options.env)
    container = Container(folder / "merged", dict(one.split("=", 1) for one in options.build_arg), passed)
    instructions = parse(options.file.read_text())
    num_stages = sum(one.name == "FROM" for one in instructions)
    if num_stages != 1:
        parser.error(f"{options.file} has {num_stages} stages; one is done here")
    return 0 if build(container, instructions, options.check) else 1


def _in_a_namespace_of_its_own(beside: Path) -> int:
    # So that SIGTERM, too, ends the steps and deletes the overlay.
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    # The overlay's layers must be on a file system that is none itself: where the root is.
    with tempfile.TemporaryDirectory(dir=beside, prefix="run_docker_") as folder:
        Path(folder).chmod(0o755)
        unshare = ["unshare", "--mount", "--propagation", "private", "--pid", "--fork", "--kill-child", "--mount-proc"]
        command = [*unshare, sys.executable, *sys.argv]
        return subprocess.run(command, env=os.environ | {INSIDE: folder}).returncode


if __name__ == "__main__":
    sys.exit(main())
