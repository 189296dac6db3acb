"""Safetensors files: what is in them comes out bit by bit, and a damaged one is refused with its name."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from safetensors.numpy import save_file

from service.errors import ModelError
from service.model.safetensors_file import SafetensorsFile

TWO = {
    "a": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
    "b": {"dtype": "F16", "shape": [4], "data_offsets": [16, 24]},
}


def write(path: Path, header: Any, data: bytes = bytes(24)) -> Path:
    """`header`: bytes as they are, or whatever JSON can hold."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)
    return path


def changed(name: str, **fields: Any) -> dict[str, Any]:
    return {**TWO, name: {**TWO[name], **fields}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "model.safetensors"


def test_tensors_come_out_as_they_were_saved(file: Path) -> None:
    saved: dict[str, NDArray[Any]] = {
        "whole": np.arange(12, dtype=np.float32).reshape(3, 4),
        "half": np.array([-0.0, 1.5, 6e-8, np.inf], np.float16),
        "double": np.array([[np.pi]]),
        "brain": np.array([1, -2, 3], bfloat16),
        "none": np.zeros((0, 4), np.float32),
        "scalar": np.array(7, np.float32),
    }
    save_file(saved, file, metadata={"format": "pt"})

    opened = SafetensorsFile(file)

    assert opened.shapes == {name: array.shape for name, array in saved.items()}
    for name, array in saved.items():
        assert opened.tensor(name).dtype == array.dtype
        assert opened.tensor(name).tobytes() == array.tobytes()


def test_every_bfloat16_code_is_widened_exactly(file: Path) -> None:
    codes = np.arange(65536, dtype=np.uint16)
    save_file({"codes": codes.view(bfloat16)}, file)

    wide = SafetensorsFile(file).tensor("codes").astype(np.float32)

    want = codes.astype(np.uint32) << 16
    not_nan = ~np.isnan(want.view(np.float32))  # NaNs stay NaNs; which ones is up to the processor
    np.testing.assert_array_equal(wide.view(np.uint32)[not_nan], want[not_nan])
    assert np.isnan(wide[~not_nan]).all()


def test_a_tensor_at_an_odd_byte_is_read_right(file: Path) -> None:
    header = {
        "odd": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
    }
    write(file, header, b"\xff" + np.array([1.25, -3], np.float32).tobytes())

    tensor = SafetensorsFile(file).tensor("odd")

    np.testing.assert_array_equal(tensor, [1.25, -3])
    assert tensor.flags.aligned


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (b"\xff\xfe{}", "header is not JSON"),
        (b"{", "header is not JSON"),
        (b"[" * 100_000, "header is not JSON"),
        ([1, 2], "header is a list; an object is wanted"),
        ({**TWO, "a": None}, "entry for a is not a tensor's"),
        ({**TWO, "a": "F32"}, "entry for a is not a tensor's"),
        (changed("a", shape=None), "entry for a is not a tensor's"),
        (changed("a", shape=[-2, -2]), "entry for a is not a tensor's"),
        (changed("a", shape=[2.0, 2]), "entry for a is not a tensor's"),
        (changed("a", data_offsets=[0]), "entry for a is not a tensor's"),
        (changed("a", data_offsets=[16, 0]), "entry for a is not a tensor's"),
        (changed("a", data_offsets=[0, 15]), r"tensor a \(F32 \[2, 2\]\) has 15 bytes; 16 are wanted"),
        (changed("a", shape=[2, 3]), r"tensor a \(F32 \[2, 3\]\) has 16 bytes; 24 are wanted"),
        (changed("b", shape=[8], data_offsets=[16, 32]), "was cut off: the tensor b ends at"),
        (changed("b", data_offsets=[8, 16]), "the tensor b begins at"),  # overlaps a
        (changed("b", shape=[2], data_offsets=[20, 24]), "the tensor b begins at"),  # a gap before it
        (changed("b", shape=[2], data_offsets=[16, 20]), "the last tensor ends at"),
        (changed("b", shape=[2**70], data_offsets=[16, 16 + 2**71]), "was cut off"),
    ],
)
def test_a_header_that_makes_no_sense_is_refused(file: Path, header: Any, message: str) -> None:
    write(file, header)

    with pytest.raises(ModelError, match=message) as caught:
        SafetensorsFile(file)

    assert str(file) in str(caught.value)


def test_a_file_cut_off_anywhere_is_refused(file: Path) -> None:
    whole = write(file, TWO).read_bytes()

    for length in range(len(whole)):
        file.write_bytes(whole[:length])
        with pytest.raises(ModelError, match=r"model\.safetensors.*(cut off|no whole safetensors file)"):
            SafetensorsFile(file)


@pytest.mark.parametrize("length", [2**64 - 1, 10**12, 100_000_001])
def test_an_absurd_header_length_is_refused_before_memory_is_taken(file: Path, length: int) -> None:
    file.write_bytes(struct.pack("<Q", length) + b"{}")

    with pytest.raises(ModelError, match=f"header should have {length} bytes, and the file has 10"):
        SafetensorsFile(file)


def test_a_git_lfs_pointer_is_recognised(file: Path) -> None:
    file.write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n")

    with pytest.raises(ModelError, match=r"Git LFS pointer.*git lfs pull"):
        SafetensorsFile(file)


def test_a_file_that_is_gone_or_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"gone\.safetensors can't be read: No such file"):
        SafetensorsFile(tmp_path / "gone.safetensors")
    with pytest.raises(ModelError, match="can't be read: Is a directory"):
        SafetensorsFile(tmp_path)


def test_only_tensors_that_are_needed_must_have_a_known_dtype(file: Path) -> None:
    write(file, changed("b", dtype="F8_E4M3", shape=[8]))
    opened = SafetensorsFile(file)

    opened.check_dtypes({"a", "not here"})

    with pytest.raises(ModelError, match=r"the tensor b is F8_E4M3; F64, F32, F16, BF16 are supported"):
        opened.check_dtypes({"b"})


# At the byte `where` of the file, `what` is written.
@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(changes=st.lists(st.tuples(st.integers(0, 200), st.integers(0, 255)), min_size=1, max_size=4))
@example(changes=[(7, 255)])
@example(changes=[(20, 0)])
def test_flipped_bytes_are_refused_or_harmless(file: Path, changes: list[tuple[int, int]]) -> None:
    content = bytearray(write(file, TWO).read_bytes())
    for where, what in changes:
        content[where % len(content)] = what
    file.write_bytes(content)

    try:
        opened = SafetensorsFile(file)
        opened.check_dtypes(set(opened.shapes))
    except ModelError:
        pass  # any other exception fails the test
    else:
        for name, shape in opened.shapes.items():
            assert opened.tensor(name).shape == shape
