"""The commands of `photoninfer`: arguments -> Settings -> one call."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from service import __version__
from service.environment import load_settings, set_thread_count
from service.errors import PhotonError, SettingsError
from service.options import default_text, help_text
from service.progress import say
from service.settings import OPTIONS, Settings

_COMMANDS = {
    "serve": "serve a model over HTTP (the default model if none is named)",
    "pull": "download a model and prepare it, so that the next start is quick",
    "compile": "compile a model's CUDA kernels, so that the next start is quick; needs no GPU",
    "quantize": "write a model anew with INT8 weights",
    "perplexity": "how well a model foretells a text; JSON on standard output",
    "bench": "measure this machine: decode, prefill, start-up, over HTTP; JSON on standard output",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command. Exit codes: 0, 1 (failed, with one line why), 2 (wrong usage)."""
    given = vars(_parser().parse_args(arguments))
    command = given.pop("command")
    try:
        settings = load_settings(given)
    except SettingsError as error:
        say(f"photoninfer: {error}")
        return 2
    set_thread_count(settings)  # before anything imports NumPy, hence the imports further down
    try:
        return _RUN[command](settings, given)
    except PhotonError as error:
        say(f"photoninfer: {error}")
        return 1
    except KeyboardInterrupt:
        return 130


def _serve(settings: Settings, given: dict[str, object]) -> int:
    from service.app import serve
    from service.logs import set_up_logs

    set_up_logs(settings)
    return serve(settings)


def _pull(settings: Settings, given: dict[str, object]) -> int:
    from service.model.locate import find_model
    from service.progress import TerminalProgress

    progress = TerminalProgress()
    checkpoint = find_model(settings, progress)
    progress.close()
    print(checkpoint.path)
    return 0


def _compile(settings: Settings, given: dict[str, object]) -> int:
    import msgspec

    from service.engine.compile import choose_archs, compile_kernels
    from service.model.locate import find_model
    from service.progress import TerminalProgress
    from service.text.tokenizer import Tokenizer

    archs = choose_archs(cast("list[str] | None", given["arch"]) or ())
    progress = TerminalProgress()
    try:  # weights are not needed: only their headers are read
        checkpoint = find_model(msgspec.structs.replace(settings, weight_cache=False), progress)
        vocab_size = Tokenizer(checkpoint.tokenizer).vocab_size
        compiled = compile_kernels(
            checkpoint.config,
            settings,
            archs,
            vocab_size=vocab_size,
            progress=progress,
            group_sizes=checkpoint.group_sizes,
        )
    finally:
        progress.close()
    for each in compiled:
        print(f"{each.arch}: {each.num_new} of {each.num_kernels} kernels compiled into {each.folder}")
    return 0


def _quantize(settings: Settings, given: dict[str, object]) -> int:
    import msgspec

    from service.model.locate import find_model
    from service.model.quantization import Quantization
    from service.model.quantize import quantize_checkpoint
    from service.progress import TerminalProgress

    progress = TerminalProgress()
    quantization = Quantization(
        group_size=settings.group_size,
        embedding=settings.quantize_embedding,
        head=settings.quantize_head,
    )
    try:
        checkpoint = find_model(msgspec.structs.replace(settings, weight_cache=False), progress)
        out = quantize_checkpoint(checkpoint, Path(str(given["out"])).expanduser(), quantization, progress)
    finally:
        progress.close()
    print(out)
    return 0


def _perplexity(settings: Settings, given: dict[str, object]) -> int:
    from service.perplexity import run_perplexity

    window, stride = cast("int | None", given["window"]), cast("int | None", given["stride"])
    return run_perplexity(settings, Path(str(given["text"])), window, stride)


def _bench(settings: Settings, given: dict[str, Any]) -> int:
    from service.bench import run_bench

    return run_bench(settings, given["url"], given["api_key"])


_RUN = {
    "serve": _serve,
    "pull": _pull,
    "compile": _compile,
    "quantize": _quantize,
    "perplexity": _perplexity,
    "bench": _bench,
}


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="photoninfer",
        description="OpenAI-compatible inference server for Llama 3 and Qwen3.",
        epilog="Every option is also a variable PHOTON_<NAME> and a key of the TOML file of --config. "
        "Order: flag, PHOTON_ variable, PORT (for the port), file, default.",
    )
    parser.add_argument("--version", action="version", version=f"photoninfer {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, text in _COMMANDS.items():
        command = commands.add_parser(name, help=text, description=text, epilog=parser.epilog)
        command.add_argument(
            "model",
            nargs="?",
            default=argparse.SUPPRESS,
            metavar="MODEL",
            help="the same as --model",
        )
        _add_options(command)
        if name == "compile":
            command.add_argument(
                "--arch",
                action="append",
                help="GPU architecture, such as sm_80 or sm_90a; may be given again "
                "(default: that of the GPU here)",
            )
        if name == "quantize":
            command.add_argument("out", metavar="OUT", help="directory to write; must not exist")
        if name == "perplexity":
            command.add_argument("--text", required=True, metavar="FILE", help="plain text in UTF-8")
            command.add_argument(
                "--window", type=int, help="tokens to a window (default: 1024, or the model's context)"
            )
            command.add_argument(
                "--stride", type=int, help="tokens from window to window (default: half a window)"
            )
        if name == "bench":
            command.add_argument("--url", help="measure a running server instead, such as http://host:5728")
            command.add_argument("--api-key", metavar="KEY", help="what the server of --url asks for")
    return parser


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--config", metavar="FILE", help="TOML file with settings")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for option in OPTIONS:
        group = groups.get(option.group) or groups.setdefault(
            option.group, parser.add_argument_group(option.group)
        )
        text = f"{help_text(option)} (default: {default_text(option)})".replace("%", "%%")
        if option.is_bool:
            group.add_argument(option.flag, action=argparse.BooleanOptionalAction, default=None, help=text)
        elif option.is_list:
            group.add_argument(option.flag, action="append", metavar="NAME", help=text)
        else:
            group.add_argument(
                option.flag, metavar=option.flag.strip("-").split("-")[-1].upper(), help=text
            )
