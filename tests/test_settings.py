"""service/settings.py and the texts made from it."""

import math
import tomllib
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from service.environment import load_settings, read_hf_token, usable_cores
from service.errors import SettingsError
from service.options import as_toml
from service.settings import OPTIONS, Settings

ROOT = Path(__file__).parents[1]
REMAKE = (
    "python -c 'from service.options import *; print(as_toml(Settings()), end=str())' > config/default.toml"
)


def write(folder: Path, text: str) -> str:
    file = folder / "settings.toml"
    file.write_text(text)
    return str(file)


def test_a_flag_goes_before_variable_port_file_and_default(tmp_path: Path) -> None:
    file = write(tmp_path, "port = 1")
    everything = {"PHOTON_PORT": "3", "PORT": "2"}

    assert load_settings({}, {}).port == 5728
    assert load_settings({"config": file}, {}).port == 1
    assert load_settings({"config": file}, {"PORT": "2"}).port == 2
    assert load_settings({"config": file}, everything).port == 3
    assert load_settings({"config": file, "port": "4"}, everything).port == 4


def test_the_file_can_be_named_by_a_variable_and_by_a_flag_before_it(tmp_path: Path) -> None:
    file = write(tmp_path, 'host = "0.0.0.0"')

    assert load_settings({}, {"PHOTON_CONFIG": file}).host == "0.0.0.0"
    assert load_settings({"config": file}, {"PHOTON_CONFIG": "/nowhere"}).host == "0.0.0.0"


def test_a_flag_that_was_not_given_hides_nothing() -> None:
    flags = {option.name: None for option in OPTIONS}

    assert load_settings(flags, {"PHOTON_MAX_RUNNING": "7"}).max_running == 7


def test_a_list_comes_from_commas_or_repeated_flags_or_an_array(tmp_path: Path) -> None:
    file = write(tmp_path, 'served_model_name = ["a", "b"]')

    for flags, variables in (
        ({"config": file}, {}),
        ({"served_model_name": ["a", "b"]}, {}),
        ({}, {"PHOTON_SERVED_MODEL_NAME": "a, b,"}),
    ):
        assert load_settings(flags, variables).served_model_name == ("a", "b")


@pytest.mark.parametrize("word", ["false", "0", "False"])
def test_a_switch_can_be_turned_off_by_a_variable(word: str) -> None:
    assert load_settings({}, {"PHOTON_PREFIX_CACHE": word}).prefix_cache is False


def test_an_empty_variable_counts_as_unset() -> None:
    assert load_settings({}, {"PHOTON_PORT": "", "PORT": ""}).port == 5728


@pytest.mark.parametrize(
    ("name", "near"),
    [("PHOTON_PROT", "PHOTON_PORT"), ("PHOTON_MAX_RUN", "PHOTON_MAX_RUNNING")],
)
def test_an_unknown_variable_is_refused_with_the_nearest_one(name: str, near: str) -> None:
    with pytest.raises(SettingsError, match=rf"{name}.*Did you mean {near}\?"):
        load_settings({}, {name: "1"})


def test_an_unknown_key_is_refused_with_file_and_nearest_key(tmp_path: Path) -> None:
    file = write(tmp_path, "max_runing = 3")

    with pytest.raises(SettingsError, match=r"settings\.toml.*max_runing\. Did you mean max_running\?"):
        load_settings({"config": file}, {})


def test_links_that_kubernetes_sets_for_a_service_called_photon_are_no_settings() -> None:
    links = {
        "PHOTON_PORT": "tcp://10.0.0.1:80",
        "PHOTON_PORT_80_TCP": "tcp://10.0.0.1:80",
        "PHOTON_PORT_80_TCP_ADDR": "10.0.0.1",
        "PHOTON_PORT_80_TCP_PROTO": "tcp",
        "PHOTON_SERVICE_HOST": "10.0.0.1",
        "PHOTON_SERVICE_PORT": "80",
        "PHOTON_SERVICE_PORT_HTTP": "80",
    }

    assert load_settings({}, links) == Settings()


@pytest.mark.parametrize(
    ("source", "flags", "variables"),
    [
        ("--port", {"port": "80x"}, {}),
        ("--port", {"port": "65536"}, {}),
        ("PORT", {}, {"PORT": "-1"}),
        ("PHOTON_BLOCK_SIZE", {}, {"PHOTON_BLOCK_SIZE": "0"}),
        ("PHOTON_PREFIX_CACHE", {}, {"PHOTON_PREFIX_CACHE": "perhaps"}),
        ("--device", {"device": "tpu"}, {}),
        ("--gpu-memory-fraction", {"gpu_memory_fraction": "0"}, {}),
        ("--gpu-memory-fraction", {"gpu_memory_fraction": "1.5"}, {}),
        ("--kv-cache-gib", {"kv_cache_gib": "nan"}, {}),
        ("--drain-seconds", {"drain_seconds": "inf"}, {}),
        ("--drain-seconds", {"drain_seconds": "-1"}, {}),
    ],
)
def test_a_bad_value_is_refused_with_its_source_and_what_is_allowed(
    source: str, flags: dict[str, Any], variables: dict[str, str]
) -> None:
    value = next(iter((flags or variables).values()))

    with pytest.raises(SettingsError, match=rf"^{source} is '{value}'; it takes \w+"):
        load_settings(flags, variables)


@pytest.mark.parametrize("origin", ["*", "http://localhost:3000", "https://app.example.org"])
def test_origins_are_read_with_their_schemes(origin: str) -> None:
    assert load_settings({}, {"PHOTON_CORS_ORIGINS": origin}).cors_origins == (origin,)


@pytest.mark.parametrize(
    "origin", ["app.example.org", "https://", "https://a.org/", "https://a.org/b", "**"]
)
def test_what_no_browser_sends_as_an_origin_is_refused(origin: str) -> None:
    with pytest.raises(SettingsError, match=r"PHOTON_CORS_ORIGINS is .*; it takes origins such as https"):
        load_settings({}, {"PHOTON_CORS_ORIGINS": f"https://good.org,{origin}"})


def test_a_number_in_quotes_is_no_number_in_a_file(tmp_path: Path) -> None:
    file = write(tmp_path, 'port = "80"')

    with pytest.raises(SettingsError, match=r"port in .* is '80'; it takes a whole number from 0 to 65535"):
        load_settings({"config": file}, {})


@pytest.mark.parametrize(("content", "reason"), [(b"port", "is not TOML"), (b"\xff", "is not TOML")])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, content: bytes, reason: str) -> None:
    file = tmp_path / "broken.toml"
    file.write_bytes(content)

    with pytest.raises(SettingsError, match=rf"broken\.toml {reason}"):
        load_settings({"config": str(file)}, {})


def test_a_missing_file_is_refused_by_name() -> None:
    with pytest.raises(SettingsError, match=r"/no/file\.toml can't be read: No such file"):
        load_settings({"config": "/no/file.toml"}, {})


@given(st.text(max_size=12).filter(lambda text: "\0" not in text), st.sampled_from(OPTIONS))
@example("null", next(option for option in OPTIONS if option.name == "threads"))
def test_any_text_gives_valid_settings_or_a_settings_error(text: str, option: Any) -> None:
    try:
        settings = load_settings({}, {option.variable: text})
    except SettingsError as error:
        refusal = str(error)
    else:
        raw = msgspec.to_builtins(settings)
        assert msgspec.convert(raw, Settings) == settings
        assert not any(isinstance(value, float) and not math.isfinite(value) for value in raw.values())
        return
    assert option.variable in refusal


def test_the_token_comes_from_variable_or_file_and_is_no_setting(tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    settings = load_settings({"hf_token_file": str(file)}, {"PHOTON_HF_TOKEN": "secret"})

    assert read_hf_token(settings, {"PHOTON_HF_TOKEN": "secret"}) == "secret"
    assert read_hf_token(settings, {"HF_TOKEN": "other"}) == "from-file"
    assert read_hf_token(Settings(), {"HF_TOKEN": "other"}) == "other"
    assert read_hf_token(Settings(), {}) is None
    assert "secret" not in repr(settings)


def test_a_token_file_that_cannot_be_read_is_named() -> None:
    with pytest.raises(SettingsError, match=r"/no/token.*No such file"):
        read_hf_token(Settings(hf_token_file="/no/token"), {})


def test_every_option_has_help_and_what_is_allowed() -> None:
    assert len(OPTIONS) == len(msgspec.structs.fields(Settings))
    for option in OPTIONS:
        assert len(option.help) > 15
        assert option.allowed


def test_the_shipped_default_file_is_what_settings_say() -> None:
    text = (ROOT / "config" / "default.toml").read_text()

    assert text == as_toml(Settings()), f"remake it: {REMAKE}"


@pytest.mark.parametrize("file", sorted((ROOT / "config").glob("*.toml")), ids=lambda file: file.name)
def test_every_shipped_file_can_be_loaded(file: Path) -> None:
    settings = load_settings({"config": str(file)}, {})

    differing = tomllib.loads(file.read_text())
    if file.name == "default.toml":
        assert settings == Settings()
    else:
        default = msgspec.structs.asdict(Settings())
        assert all(value != default[key] for key, value in differing.items())


def test_at_least_one_core_can_be_used() -> None:
    assert usable_cores() >= 1
