"""The Dockerfile's steps in a plain directory, without a Docker engine.

Every instruction is read from the Dockerfile by Docker's own parser. Absolute paths come to lie below the
directory; one directory stands for the file systems of all stages, so that COPY between stages must keep
its path. What needs root, a network or another Python is left out and noted.
"""

import fnmatch
import os
import re
import shutil
import stat
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import dockerfile

ROOT = Path(__file__).parents[2]
_PATH = re.compile(r"(?<![\w/.])/(?=[a-z])")
_LEFT_OUT = {"useradd": "makes a user of this machine", "chown": "needs that user"}


class Image:
    """One target, built below `root`."""

    def __init__(self, root: Path, target: str, build_args: Mapping[str, str]) -> None:
        self.root = root
        self.left_out: list[str] = []
        self.environment: dict[str, str] = {}
        self.user = 0
        self.entrypoint: tuple[str, ...] = ()
        self.command: tuple[str, ...] = ()
        self.health_check: tuple[str, ...] = ()
        self._build_args = build_args
        self._folder = root
        self._stages = _stages(ROOT / "Dockerfile")
        self._built: set[str] = set()
        self._make_base()
        self._build(target)

    def place(self, text: str) -> str:
        """Absolute paths of the image -> paths below `root`."""
        return _PATH.sub(f"{self.root}/", text)

    def start(self, command: Sequence[str], **more: str) -> "subprocess.Popen[str]":
        """As a container would: nothing of our own environment, and as the image's user where that works.

        It takes root, and a Python that lies where everybody may run it.
        """
        identity: dict[str, Any] = {}
        python = Path(sys.executable).resolve()
        if os.geteuid() == 0 and all(
            each.stat().st_mode & stat.S_IXOTH for each in (python, *python.parents)
        ):
            identity = {"user": self.user, "group": self.user, "extra_groups": []}
        environment = self.environment | more
        program = shutil.which(command[0], path=environment["PATH"])
        assert program is not None, command
        return subprocess.Popen(
            [program, *command[1:]],
            cwd=self.root,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            **identity,
        )

    def _make_base(self) -> None:
        """What python:slim has: a Python without packages, system programs, a folder for everybody."""
        programs = self.root / "usr" / "local" / "bin"
        programs.mkdir(parents=True)
        (programs / "python").symlink_to(Path(sys.executable).resolve())
        (self.root / "tmp").mkdir()
        (self.root / "tmp").chmod(0o1777)

    def _build(self, name: str) -> None:
        if name not in self._built:
            self._built.add(name)
            base, steps = self._stages[name]
            if base in self._stages:
                self._build(base)
            else:
                self.environment = {"PATH": f"{self.root}/usr/local/bin:/usr/bin:/bin"}
                assert base.startswith("python:")
            for step in steps:
                self._do(step)

    def _do(self, step: dockerfile.Command) -> None:
        value = step.value
        match step.cmd:
            case "ARG":
                name, _, default = value[0].partition("=")
                self.environment[name] = self._build_args.get(name, default.strip('"'))
            case "ENV":
                for name, text in zip(value[::2], value[1::2], strict=True):
                    placed = self.place(text).replace("$PATH", self.environment["PATH"])
                    self.environment[name] = placed
            case "WORKDIR":
                self._folder = Path(self.place(value[0]))
                self._folder.mkdir(parents=True, exist_ok=True)
            case "COPY":
                self._copy(step)
            case "RUN":
                for part in value[0].split(" && "):
                    self._run(part)
            case "USER":
                self.user = int(value[0])
            case "ENTRYPOINT" | "CMD" | "HEALTHCHECK":
                assert step.json, "a shell would keep signals to itself"
                name = {"ENTRYPOINT": "entrypoint", "CMD": "command", "HEALTHCHECK": "health_check"}[
                    step.cmd
                ]
                setattr(self, name, value[1:] if step.cmd == "HEALTHCHECK" else value)
            case _:
                assert step.cmd == "EXPOSE", f"{step.cmd} is new: say here what it means"

    def _copy(self, step: dockerfile.Command) -> None:
        stages = [flag.removeprefix("--from=") for flag in step.flags]
        if stages:
            kept = dict(self.environment)
            self._build(stages[0])
            self.environment = kept
            assert step.value[0] == step.value[1], "an environment of Python can't be moved"
            assert Path(self.place(step.value[0])).is_dir()
        else:
            assert step.value == (".", ".")
            copy_context(self._folder)

    def _run(self, command: str) -> None:
        if (reason := _LEFT_OUT.get(command.split()[0])) is not None:
            self.left_out.append(f"{command}: {reason}")
            return
        offline = {
            "PIP_NO_INDEX": "1",
            "PIP_NO_DEPS": "1",
            "PIP_NO_BUILD_ISOLATION": "0",
            "HOME": "/nowhere",
        }
        done = subprocess.run(
            ["/bin/sh", "-c", self.place(command)],
            cwd=self._folder,
            env=offline | self.environment,
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}{done.stderr}"
        if "-m venv" in command:
            self._lend_packages(Path(self.place(command.split()[-1])))

    def _lend_packages(self, home: Path) -> None:
        """Dependencies come from the tests' own environment instead of an index; our package does not."""
        (packages,) = home.glob("lib/python*/site-packages")
        for folder in (Path(each) for each in sys.path if each.endswith("site-packages")):
            for each in folder.iterdir():
                ours = each.name.startswith(("photoninfer", "_photoninfer", "__editable__"))
                if not ours and not (packages / each.name).exists():
                    (packages / each.name).symlink_to(each)
        self.left_out.append("dependencies of pip install: lent by the environment of the tests")


def _stages(path: Path) -> dict[str, tuple[str, list[dockerfile.Command]]]:
    """Stages by name: what they are made from, and their steps."""
    stages: dict[str, tuple[str, list[dockerfile.Command]]] = {}
    steps: list[dockerfile.Command] = []
    for command in dockerfile.parse_file(str(path)):
        if command.cmd == "FROM":
            base, _, name = command.value
            steps = []
            stages[name] = (base, steps)
        else:
            steps.append(command)
    return stages


def copy_context(target: Path) -> None:
    """What .dockerignore lets through, of what is in the repository."""
    lines = (ROOT / ".dockerignore").read_text().split()
    assert lines[0] == "*"
    ignored = [line.removeprefix("**/") for line in lines[1:] if not line.startswith("!")]
    for name in (line.removeprefix("!") for line in lines if line.startswith("!")):
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns(*ignored))
        elif not any(fnmatch.fnmatch(name, pattern) for pattern in ignored):
            shutil.copy(source, target / name)
