"""service/api_keys.py: which keys there are."""

import logging
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.api_keys import find_key, read_api_keys
from service.environment import load_settings
from service.errors import SettingsError
from service.settings import Settings

SECRET = "sk-5e5ame"


def keys_file(folder: Path, text: str | bytes, mode: int = 0o600) -> Settings:
    file = folder / "keys"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    file.chmod(mode)
    return Settings(api_keys_file=str(file))


def scopes_of(settings: Settings, *given: str, variable: str = "") -> list[str | None]:
    keys = read_api_keys(settings, {"PHOTON_API_KEYS": variable})
    found = [find_key(keys, each.encode()) for each in given]
    return [None if key is None else key.scope for key in found]


def test_a_file_holds_a_key_a_line_with_a_scope_if_it_is_not_inference(tmp_path: Path) -> None:
    settings = keys_file(
        tmp_path, "\ufeff# ours\n\nfirst\n  second\tinference \r\nthird metrics\n # no\nlast,one"
    )

    assert scopes_of(settings, "first", "second", "third", "last,one", "# ours", "no", "", "metrics") == (
        ["inference", "inference", "metrics", "inference", None, None, None, None]
    )


def test_the_variable_holds_keys_separated_by_commas_and_adds_to_the_file(tmp_path: Path) -> None:
    settings = keys_file(tmp_path, "first")

    found = scopes_of(settings, "first", "a", "b", "a,b", "", variable="a, b metrics,,first")

    assert found == ["inference", "inference", "metrics", None, None]


def test_without_file_and_variable_there_are_no_keys() -> None:
    assert read_api_keys(Settings(), {}) == ()
    assert read_api_keys(Settings(), {"PHOTON_API_KEYS": ""}) == ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("", "keys holds no key"),
        ("\n  \n# none\n", "keys holds no key"),
        (b"\xff\xfe\x00", "keys is not a text file"),
        (f"good\n{SECRET}\u00e9", "keys, line 2: a key is made of visible ASCII"),
        (f"good\n{SECRET}\0", "keys, line 2: a key is made of visible ASCII"),
        (f"good\n\n{SECRET} admin", "keys, line 3: after the key stands nothing, or its scope"),
        (f"{SECRET} metrics inference", "keys, line 1: after the key"),
        (f"{SECRET}\n{SECRET} metrics", "keys, line 2: the key was given before, with another scope"),
        (f"{SECRET} metrics", "scope metrics"),
    ],
)
def test_a_file_that_gives_no_sound_keys_is_refused_without_showing_any(
    tmp_path: Path, content: str | bytes, words: str
) -> None:
    with pytest.raises(SettingsError) as refused:
        read_api_keys(keys_file(tmp_path, content), {})

    assert words in str(refused.value)
    assert SECRET not in str(refused.value)


@pytest.mark.parametrize("name", ["missing", "."])
def test_a_file_that_can_not_be_read_is_refused_by_name(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=r"api_keys_file: .* can't be read"):
        read_api_keys(Settings(api_keys_file=str(tmp_path / name)), {})


@pytest.mark.parametrize(
    ("variable", "words"), [(",", "holds no key"), (f"a,{SECRET} root", "PHOTON_API_KEYS, key 2")]
)
def test_a_variable_without_sound_keys_is_refused(variable: str, words: str) -> None:
    with pytest.raises(SettingsError, match=words) as refused:
        read_api_keys(Settings(), {"PHOTON_API_KEYS": variable})

    assert SECRET not in str(refused.value)


def test_a_key_for_metrics_can_not_be_asked_for_when_there_are_no_keys() -> None:
    with pytest.raises(SettingsError, match="metrics_key is true, but there is no API key"):
        read_api_keys(Settings(metrics_key=True), {})


@pytest.mark.parametrize(
    ("mode", "is_warned"), [(0o600, False), (0o440, False), (0o644, True), (0o604, True)]
)
def test_a_file_that_everybody_can_read_is_warned_about(
    tmp_path: Path, mode: int, is_warned: bool, caplog: pytest.LogCaptureFixture
) -> None:
    settings = keys_file(tmp_path, SECRET, mode)
    with caplog.at_level(logging.WARNING):
        read_api_keys(settings, {})

    assert ("every user of this machine can read it" in caplog.text) is is_warned
    assert SECRET not in caplog.text


def test_keys_are_no_settings_and_are_not_kept() -> None:
    variables = {"PHOTON_API_KEYS": SECRET}
    settings = load_settings({}, variables)

    assert settings == Settings()
    assert SECRET not in repr(read_api_keys(settings, variables))


def test_a_misspelt_variable_is_refused_without_its_value() -> None:
    with pytest.raises(SettingsError, match=r"PHOTON_API_KEY\. Did you mean PHOTON_API_KEYS\?$"):
        load_settings({}, {"PHOTON_API_KEY": SECRET})


@given(
    st.lists(st.text(st.characters(min_codepoint=0x21, max_codepoint=0x7E), min_size=1), min_size=1),
    st.data(),
)
def test_exactly_the_keys_of_the_list_are_found(texts: list[str], data: st.DataObject) -> None:
    texts = [text.replace(",", ".") for text in texts]
    keys = read_api_keys(Settings(), {"PHOTON_API_KEYS": ",".join(texts)})
    other = data.draw(st.text(max_size=5) | st.sampled_from(texts).map(lambda text: text[:-1]))

    assert all(find_key(keys, text.encode()) for text in texts)
    assert (find_key(keys, other.encode()) is not None) == (other in texts)
