"""The options as text: config/default.toml and the table in the README. Tests keep both equal to this."""

import msgspec

from service.settings import OPTIONS, Option, Settings

_WIDTH = 104


def as_toml(settings: Settings) -> str:
    """Settings as a commented TOML file; what is unset stands as a comment."""
    lines = [
        "# Settings of PhotonInfer. Use with `photoninfer serve --config FILE`.",
        "# A flag or a PHOTON_* variable goes before what stands here.",
    ]
    group = None
    for option in OPTIONS:
        if option.group != group:
            group = option.group
            lines += ["", f"## {group}"]
        value = getattr(settings, option.name)
        unit = f" [{option.unit}]" if option.unit else ""
        is_unset = value is None or value == ()
        lines += [f"# {option.help}{unit}"]
        lines += [f"# {option.name} =" if is_unset else f"{option.name} = {_toml_value(value)}"]
    return "\n".join(lines) + "\n"


def as_markdown() -> str:
    """The table of options."""
    lines = ["| flag | variable | default | what it does |", "| --- | --- | --- | --- |"]
    for option in OPTIONS:
        lines.append(
            f"| `{flag_text(option)}` | `{option.variable}` | {default_text(option)} "
            f"| {help_text(option)} |"
        )
    return "\n".join(lines) + "\n"


def flag_text(option: Option) -> str:
    """`--no-offline` and the like are in `--help`; the table shows what changes the default."""
    return option.flag.replace("--", "--no-", 1) if option.default is True else option.flag


def default_text(option: Option) -> str:
    """The default as a person would write it."""
    if option.default is None or option.default == ():
        return "unset"
    return (
        str(option.default).lower()
        if option.is_bool
        else f"{option.default:g}"
        if isinstance(option.default, float)
        else str(option.default)
    )


def help_text(option: Option) -> str:
    """What the option does, its values and its unit."""
    text = option.help
    if option.allowed.startswith("one of"):
        text += f" ({option.allowed})"
    if option.unit:
        text += f" [{option.unit}]"
    return text


def _toml_value(value: object) -> str:
    # JSON's strings, numbers, booleans and flat lists are TOML's too
    return msgspec.json.encode(value).decode()
