"""Model directories: whole ones open, and every way to be incomplete is refused with file and tensor."""

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from service.errors import ModelError, UnsupportedModelError
from service.model.checkpoint import open_checkpoint
from service.model.config import SamplingDefaults
from tests.checkpoints import CHATML, make_checkpoint

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("whole"))


@pytest.fixture(scope="session")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("sharded"), shard="200KB")


@pytest.fixture
def copy(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "model")


@pytest.fixture
def shards(sharded: Path, tmp_path: Path) -> Path:
    return shutil.copytree(sharded, tmp_path / "model")


def edit_json(file: Path, **fields: Any) -> None:
    old = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**old, **fields}))


def edit_tensors(directory: Path, edit: Callable[[dict[str, NDArray[Any]]], object]) -> None:
    tensors = load_file(directory / WEIGHTS)
    edit(tensors)
    save_file(tensors, directory / WEIGHTS)


def refusal(directory: Path) -> str:
    """The message with which it is refused."""
    with pytest.raises(ModelError) as caught:
        open_checkpoint(directory)
    return str(caught.value)


def test_a_whole_directory_opens_with_everything_it_says(copy: Path) -> None:
    edit_json(copy / "generation_config.json", temperature=0.6, do_sample=True, eos_token_id=[2, 0])

    checkpoint = open_checkpoint(copy)

    stored = load_file(copy / WEIGHTS)
    assert checkpoint.num_parameters == sum(array.size for array in stored.values())
    assert checkpoint.sampling_defaults == SamplingDefaults(temperature=0.6)
    assert checkpoint.config.eos_token_ids == (2, 0)
    np.testing.assert_array_equal(checkpoint.weights.layer(1).qkv[0], stored[Q_PROJ])
    assert checkpoint.tokenizer.chat_template == CHATML
    assert checkpoint.tokenizer.eos_token == "<|im_end|>"
    assert checkpoint.tokenizer.bos_token is None


def test_the_weights_file_may_be_named_instead_of_its_directory(copy: Path) -> None:
    assert open_checkpoint(copy / WEIGHTS).fingerprint == open_checkpoint(copy).fingerprint


def test_shards_hold_the_same_model(whole: Path, shards: Path) -> None:
    one, many = open_checkpoint(whole), open_checkpoint(shards)

    assert len(list(shards.glob("*.safetensors"))) > 2
    assert one.num_parameters == many.num_parameters
    for index in range(2):
        np.testing.assert_array_equal(one.weights.layer(index).down, many.weights.layer(index).down)


def test_the_fingerprint_changes_with_the_weights_and_the_config(copy: Path) -> None:
    before = open_checkpoint(copy).fingerprint
    assert open_checkpoint(copy).fingerprint == before

    os.utime(copy / WEIGHTS, ns=(1, 1))  # written anew, with the same length
    rewritten = open_checkpoint(copy).fingerprint
    edit_json(copy / "config.json", rope_theta=7)
    changed = open_checkpoint(copy).fingerprint

    assert len({before, rewritten, changed}) == 3


def test_a_tied_model_opens_with_and_without_a_stored_head(copy: Path) -> None:
    edit_json(copy / "config.json", tie_word_embeddings=True)
    assert open_checkpoint(copy).weights.head() is None

    edit_tensors(copy, lambda tensors: tensors.pop("lm_head.weight"))

    assert open_checkpoint(copy).weights.head() is None


def test_an_untied_model_without_a_head_is_refused(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.pop("lm_head.weight"))

    message = refusal(copy)

    assert f"{copy}: the tensor lm_head.weight of shape [300, 64] is missing" in message
    assert "not tied" in message


def test_a_missing_tensor_is_named(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.pop(Q_PROJ))
    assert refusal(copy) == f"{copy}: the tensor {Q_PROJ} of shape [64, 64] is missing."


def test_a_tensor_of_another_shape_is_named_with_both_shapes(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.update({Q_PROJ: np.zeros((64, 32), np.float32)}))
    assert refusal(copy) == (
        f"{copy / WEIGHTS}: the tensor {Q_PROJ} has shape [64, 32]; the config wants [64, 64]."
    )


def test_a_transposed_projection_is_refused(copy: Path) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    edit_tensors(copy, lambda tensors: tensors.update({name: np.ascontiguousarray(tensors[name].T)}))
    assert "has shape [96, 64]; the config wants [64, 96]" in refusal(copy)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int64])
def test_a_tensor_of_a_dtype_that_is_not_run_is_named(copy: Path, dtype: Any) -> None:
    edit_tensors(copy, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].astype(dtype)}))

    message = refusal(copy)

    assert str(copy / WEIGHTS) in message
    assert Q_PROJ in message
    assert "F32, F16, BF16 are supported" in message


def test_tensors_that_the_model_does_not_have_are_ignored(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.update(inv_freq=np.zeros(8, np.int64)))
    open_checkpoint(copy)


def test_files_may_mix_dtypes(copy: Path) -> None:
    edit_tensors(copy, lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].astype(np.float16)}))
    assert open_checkpoint(copy).weights.layer(1).qkv[0].dtype == np.float16


@pytest.mark.parametrize("name", ["config.json", "tokenizer.json"])
def test_a_missing_file_is_named(copy: Path, name: str) -> None:
    (copy / name).unlink()
    assert f"{copy / name} is missing" in refusal(copy)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"hidden_size": ', "is not JSON"),
        (b"[]", "holds a list; an object is wanted"),
        (b"\xff\xfe", "can't be read as text"),
        (b"[" * 100_000, "is not JSON"),
        (b"version https://git-lfs.github.com/spec/v1\n", "is a Git LFS pointer"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json", "tokenizer_config.json"])
def test_a_damaged_json_file_is_named(copy: Path, name: str, content: bytes, message: str) -> None:
    (copy / name).write_bytes(content)
    assert f"{copy / name} {message}" in refusal(copy)


def test_a_tokenizer_that_is_a_git_lfs_pointer_is_refused(copy: Path) -> None:
    (copy / "tokenizer.json").write_text("version https://git-lfs.github.com/spec/v1\n")
    assert f"{copy / 'tokenizer.json'} is a Git LFS pointer" in refusal(copy)


def test_a_missing_shard_is_named(shards: Path) -> None:
    lost = sorted(shards.glob("*.safetensors"))[1]
    lost.unlink()
    assert refusal(shards) == f"{lost} is missing; the index {INDEX} names it."


def test_a_damaged_shard_is_named(shards: Path) -> None:
    cut = sorted(shards.glob("*.safetensors"))[1]
    cut.write_bytes(cut.read_bytes()[:-4])
    assert f"{cut} was cut off" in refusal(shards)


@pytest.mark.parametrize(
    "weight_map", [None, {}, [], "all", {"a": "../model.safetensors"}, {"a": "/etc/passwd"}, {"a": 7}]
)
def test_an_index_that_makes_no_sense_is_named(shards: Path, weight_map: Any) -> None:
    (shards / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    message = refusal(shards)

    assert str(shards / INDEX) in message
    assert "no weight_map" in message or "no name of a file beside it" in message


def test_a_tensor_that_no_shard_holds_is_named(shards: Path) -> None:
    index = json.loads((shards / INDEX).read_text())
    edit_json(shards / INDEX, weight_map={Q_PROJ: index["weight_map"][Q_PROJ]})

    message = refusal(shards)

    assert f"{shards}: the tensor " in message
    assert "is missing" in message


@pytest.mark.parametrize("name", ["pytorch_model.bin", "model.pt", "model.pth"])
def test_weights_as_pickles_only_are_refused(copy: Path, name: str) -> None:
    (copy / WEIGHTS).rename(copy / name)

    for path in (copy, copy / name):
        message = refusal(path)
        assert str(path) in message
        assert "run code when" in message
        assert "safetensors" in message


def test_a_directory_without_weights_is_refused(copy: Path) -> None:
    (copy / WEIGHTS).unlink()
    assert refusal(copy) == f"{copy}: there is neither {WEIGHTS} nor {INDEX}."


def test_a_path_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    assert refusal(tmp_path / "nothing") == f"{tmp_path / 'nothing'}: no such file or directory."


def test_a_quantised_checkpoint_is_refused_by_name(copy: Path) -> None:
    edit_json(copy / "config.json", quantization_config={"quant_method": "fp8"})
    with pytest.raises(UnsupportedModelError, match="fp8"):
        open_checkpoint(copy)


@pytest.mark.parametrize(
    ("value", "template"),
    [
        ("plain", "plain"),
        ([{"name": "rag", "template": "r"}, {"name": "default", "template": "d"}], "d"),
        ([{"name": "rag", "template": "r"}], None),
        (None, None),
        (7, None),
    ],
)
def test_the_chat_template_is_read_in_all_its_spellings(
    copy: Path, value: Any, template: str | None
) -> None:
    edit_json(copy / "tokenizer_config.json", chat_template=value)
    assert open_checkpoint(copy).tokenizer.chat_template == template


def test_a_template_file_goes_before_the_one_in_the_config(copy: Path) -> None:
    (copy / "chat_template.jinja").write_text("from the file")
    assert open_checkpoint(copy).tokenizer.chat_template == "from the file"


def test_special_tokens_are_strings_or_objects_in_either_file(copy: Path) -> None:
    edit_json(copy / "special_tokens_map.json", bos_token={"content": "<|im_start|>"}, eos_token="ignored")
    edit_json(
        copy / "tokenizer_config.json",
        add_bos_token=True,
        additional_special_tokens=["<|x|>", {"content": "<|y|>"}],
    )

    tokenizer = open_checkpoint(copy).tokenizer

    assert (tokenizer.bos_token, tokenizer.eos_token) == ("<|im_start|>", "<|im_end|>")
    assert tokenizer.add_bos_token is True
    assert set(tokenizer.special_tokens) == {"<|im_start|>", "<|im_end|>", "<|x|>", "<|y|>"}
