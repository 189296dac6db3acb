"""The command line: exit codes, messages, help."""

import subprocess
import sys
from pathlib import Path

import pytest

from service import __version__
from service.cli import main
from service.options import default_text
from service.settings import OPTIONS


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "service", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 0
    return " ".join(capsys.readouterr().out.split())  # argparse breaks lines as the terminal is wide


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert shown(capsys, "--version") == f"photoninfer {__version__}"


def test_help_names_every_command_and_the_order_of_sources(capsys: pytest.CaptureFixture[str]) -> None:
    text = shown(capsys, "--help")

    for words in ("serve", "pull", "compile", "bench", "Order: flag, PHOTON_ variable, PORT"):
        assert words in text


@pytest.mark.parametrize("command", ["serve", "pull", "compile", "bench"])
def test_help_of_a_command_shows_every_option_with_its_default(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    text = shown(capsys, command, "--help")

    for option in OPTIONS:
        assert f"{option.flag} " in text or f"{option.flag}, " in text
        assert option.help in text
        assert f"(default: {default_text(option)})" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["serve", "--port", "eighty"], "--port is 'eighty'; it takes a whole number from 0 to 65535."),
        (["serve", "--config", "/no/file"], "The settings file /no/file can't be read: No such file"),
        (["serve", "--prot", "80"], "unrecognized arguments: --prot"),
        (["sevre"], "invalid choice: 'sevre'"),
        ([], "required: COMMAND"),
        (["serve", "--port"], "--port: expected one argument"),
    ],
)
def test_wrong_usage_is_one_message_and_exit_code_2(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code: object = main(arguments)
    except SystemExit as exit_:
        code = exit_.code

    captured = capsys.readouterr()
    assert code == 2
    assert message in captured.err
    assert captured.out == ""


def test_an_unknown_variable_is_wrong_usage(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PHOTON_DEVISE", "cpu")

    assert main(["serve"]) == 2
    assert "Unknown variable PHOTON_DEVISE. Did you mean PHOTON_DEVICE?" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "pull"])
def test_a_model_that_is_not_there_ends_in_one_line_and_exit_code_1(command: str) -> None:
    done = run(command, "--model", "/no/such/model", "--port", "0")

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("photoninfer: /no/such/model: no such file")
    assert "Traceback" not in done.stderr


def test_compiling_for_an_unknown_architecture_ends_in_one_line_and_exit_code_1() -> None:
    done = run("compile", "--arch", "sm_1", "--model", "/no/such/model")

    assert done.returncode == 1
    assert len(done.stderr.splitlines()) == 1
    assert done.stderr.startswith(("photoninfer: --arch is 'sm_1'; it takes one of", "photoninfer: arch: "))
    assert done.stdout == ""


def test_the_default_model_offline_without_a_cache_says_what_to_do(tmp_path: Path) -> None:
    done = run("pull", "--offline", "--cache-dir", str(tmp_path))

    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("photoninfer: The default model is not in")
    assert "photoninfer pull" in done.stderr


def test_a_checkpoint_of_something_else_is_refused_in_one_line(tmp_path: Path) -> None:
    file = tmp_path / "model.gguf"
    file.write_bytes(b"version https://git-lfs.github.com/spec/v1\n")

    done = run("serve", "--model", str(file), "--port", "0", "--cache-dir", str(tmp_path))

    assert done.returncode == 1
    assert "model.gguf" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_pull_prints_where_the_model_lies_and_nothing_else(default_model: Path) -> None:
    done = run("pull", "--offline")

    assert done.returncode == 0
    assert Path(done.stdout.strip()).is_file()
