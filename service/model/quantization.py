"""Which weights are in INT8, and the conventions in which the hub keeps such weights.

Ours to read and to write is that of compressed-tensors, format "int-quantized": `X.weight` in int8 and
`X.weight_scale` beside it. Read too: its format "pack-quantized" with 8 bits (four values in an int32,
128 added to each) and GPTQ with 8 bits (four rows in an int32, zero points of 128). What maps to
service/tensor/quantized.py exactly is read, anything else refused. Where a checkpoint says that activations
are quantised too (W8A8), we leave that out: they stay in bfloat16, or float32 on a CPU.

Sources: documentation of compressed-tensors (vllm-project), of GPTQModel (ModelCloud) and of their formats.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import numpy as np
from numpy.typing import NDArray

from service.errors import ModelError, UnsupportedModelError
from service.model.weights import EMBEDDING, HEAD, LayerWeights, WeightSource, as_floats
from service.tensor.quantized import GROUP_SIZES, QuantizedWeight

Array = NDArray[Any]
Tensor = Callable[[str], Array]

CHANNEL_GROUP = 128  # a row with one scale is as good as groups that share it
SUFFIXES = ("weight_scale", "weight_packed", "weight_shape", "qweight", "qzeros", "scales", "g_idx")


class Quantization(msgspec.Struct, frozen=True, kw_only=True):
    """What is made INT8 when a model is loaded or rewritten. Norms and biases never are."""

    group_size: int | None = None  # None: nothing
    embedding: bool = True
    head: bool = True  # a head that is the embedding goes by `embedding`

    def of(self, name: str, shape: tuple[int, ...]) -> int | None:
        """The group size of a tensor; None: it stays as it is."""
        is_left_out = (name == EMBEDDING and not self.embedding) or (name == HEAD and not self.head)
        return None if len(shape) != 2 or is_left_out else self.group_size

    @property
    def embedding_group_size(self) -> int | None:
        return self.group_size if self.embedding else None

    @property
    def head_group_size(self) -> int | None:
        return self.group_size if self.head else None


KEEP = Quantization()


class Scheme(msgspec.Struct, frozen=True, kw_only=True):
    """How a checkpoint keeps INT8 weights."""

    format: str  # int-quantized, pack-quantized, gptq
    group_size: int | None  # None: a scale for each row


def read_scheme(raw: Mapping[str, Any], file: str) -> Scheme | None:
    """From config.json. Raises: UnsupportedModelError, naming what does not map to our scheme."""
    found = raw.get("quantization_config", raw.get("compression_config"))
    if found is None:
        return None
    if not isinstance(found, Mapping):
        raise ModelError(f"{file}: quantization_config is no object.")
    method = found.get("quant_method")
    if method == "compressed-tensors":
        return _compressed_tensors(found, file)
    if method == "gptq":
        return _gptq(found, file)
    raise _refusal(file, "quant_method", method, "compressed-tensors or gptq")


def _compressed_tensors(found: Mapping[str, Any], file: str) -> Scheme:
    kind = found.get("format")
    if kind not in ("int-quantized", "pack-quantized"):
        raise _refusal(file, "format", kind, "int-quantized or pack-quantized")
    groups = found.get("config_groups")
    schemes = [group.get("weights") for group in groups.values()] if isinstance(groups, Mapping) else []
    if not schemes or not all(isinstance(scheme, Mapping) for scheme in schemes):
        raise ModelError(f"{file}: quantization_config has no config_groups with weights.")
    if any(scheme != schemes[0] for scheme in schemes):
        raise _refusal(file, "config_groups", "several schemes", "one scheme for all weights")
    scheme = schemes[0]
    for name, wanted in (("num_bits", 8), ("type", "int"), ("symmetric", True)):
        if scheme.get(name) != wanted:
            raise _refusal(file, name, scheme.get(name), wanted)
    if scheme.get("actorder"):
        raise _refusal(file, "actorder", scheme["actorder"], "no reordering")
    strategy = scheme.get("strategy")
    if strategy == "channel":
        return Scheme(format=kind, group_size=None)
    if strategy != "group":
        raise _refusal(file, "strategy", strategy, "group or channel")
    return Scheme(format=kind, group_size=_group_size(scheme.get("group_size"), file))


def _gptq(found: Mapping[str, Any], file: str) -> Scheme:
    for name, wanted in (("bits", 8), ("sym", True)):
        if found.get(name) != wanted:
            raise _refusal(file, name, found.get(name), wanted)
    if found.get("checkpoint_format", "gptq") not in ("gptq", "gptq_v2"):
        raise _refusal(file, "checkpoint_format", found["checkpoint_format"], "gptq or gptq_v2")
    size = found.get("group_size")
    return Scheme(format="gptq", group_size=None if size == -1 else _group_size(size, file))


def _group_size(size: Any, file: str) -> int:
    if size not in GROUP_SIZES:
        raise _refusal(file, "group_size", size, f"one of {', '.join(map(str, GROUP_SIZES))}")
    return int(size)


def _refusal(file: str, field: str, found: Any, wanted: Any) -> UnsupportedModelError:
    return UnsupportedModelError(
        f"{file}: weights quantised with {field} {found!r} are not supported; wanted is {wanted}."
    )


class QuantizedTensors:
    """Finds the INT8 weights of a checkpoint under the names that they would have as floats."""

    def __init__(
        self, scheme: Scheme | None, shapes: Mapping[str, tuple[int, ...]], tensor: Tensor, file: str
    ) -> None:
        """`shapes`: of everything in the files; `tensor`: reads one by name."""
        self._scheme = scheme
        self._tensor = tensor
        self._file = file
        self.shapes = {name: shape for name, shape in shapes.items() if not self._is_beside(name)}
        self.group_sizes: dict[str, int] = {}  # by name of weights in INT8
        if scheme is not None:
            for name, shape in shapes.items():
                stem, _, kind = name.rpartition(".")
                if kind == {"int-quantized": "weight_scale", "pack-quantized": "weight_packed"}.get(
                    scheme.format, "qweight"
                ):
                    weight = f"{stem}.weight"
                    self.group_sizes[weight] = scheme.group_size or CHANNEL_GROUP
                    if kind != "weight_scale":
                        across, along = shape if kind == "weight_packed" else shape[::-1]
                        self.shapes[weight] = (across, along * 4)

    def _is_beside(self, name: str) -> bool:
        return self._scheme is not None and name.rpartition(".")[2] in SUFFIXES

    def files(self, name: str) -> tuple[str, ...]:
        """Names of the tensors that a weight is read from."""
        stem = name.removesuffix("weight")
        if name not in self.group_sizes or self._scheme is None:
            return (name,)
        kinds = {
            "int-quantized": ("weight", "weight_scale"),
            "pack-quantized": ("weight_packed", "weight_scale"),
        }.get(self._scheme.format, ("qweight", "qzeros", "scales"))
        return tuple(stem + kind for kind in kinds)

    def __call__(self, name: str) -> Any:
        """A float array, or a QuantizedWeight. Raises: ModelError, UnsupportedModelError."""
        if name not in self.group_sizes or self._scheme is None:
            return self._tensor(name)
        group_size, parts = self.group_sizes[name], [self._tensor(part) for part in self.files(name)]
        if self._scheme.format == "gptq":
            values, scales = self._gptq(name, *parts)
        elif self._scheme.format == "pack-quantized":
            values, scales = (_unpacked(parts[0]) - 128).astype(np.int8), parts[1]
        else:
            values, scales = parts
        outputs, inputs = self.shapes[name]
        groups = -(-inputs // group_size)
        if scales.size == outputs:
            scales = np.repeat(scales.reshape(outputs, 1), groups, axis=1)
        if (
            values.shape != (outputs, inputs)
            or values.dtype != np.int8
            or scales.shape != (outputs, groups)
        ):
            raise ModelError(
                f"{self._file}: the tensor {name} has values {values.dtype} {list(values.shape)} and "
                f"scales {list(scales.shape)}; wanted are int8 {[outputs, inputs]} and {[outputs, groups]}."
            )
        return QuantizedWeight(values, self._exact(name, scales), group_size)

    def _exact(self, name: str, scales: Array) -> Array:
        narrow: Array = scales.astype(np.float16)
        if not (narrow.astype(np.float32) == scales.astype(np.float32)).all():
            raise UnsupportedModelError(
                f"{self._file}: scales of {name} can't be kept in float16 exactly; quantise the original "
                "model with `photoninfer quantize`."
            )
        return narrow

    def _gptq(self, name: str, qweight: Array, qzeros: Array, scales: Array) -> tuple[Array, Array]:
        zeros = _unpacked(qzeros)
        order = name.removesuffix("weight") + "g_idx"
        if not np.isin(zeros, (127, 128)).all() or np.ptp(zeros):  # version 1 keeps one less
            raise _refusal(self._file, f"zero points of {name}", "of several values", "128")
        values = (_unpacked(qweight.T) - 128).astype(np.int8)
        try:
            groups = self._tensor(order)
        except KeyError:
            return values, np.ascontiguousarray(scales.T)
        size = self.group_sizes[name] if scales.shape[0] > 1 else values.shape[1]
        if not (groups == np.arange(len(groups)) // size).all():
            raise _refusal(self._file, f"the order of columns of {name} (desc_act)", True, False)
        return values, np.ascontiguousarray(scales.T)


def _unpacked(packed: Array) -> Array:
    """Shapes: packed int32 [rows, n]; result int16 [rows, 4 n]; lowest byte first."""
    content: Array = np.ascontiguousarray(packed, "<i4").view(np.uint8)
    return content.astype(np.int16)


class FloatWeights:
    """A WeightSource whose INT8 weights come as float32."""

    def __init__(self, source: WeightSource) -> None:
        self._source = source

    def embedding(self) -> Any:
        return as_floats(self._source.embedding())

    def head(self) -> Any:
        return as_floats(self._source.head())

    def final_norm(self) -> Any:
        return self._source.final_norm()

    def layer(self, index: int) -> LayerWeights:
        layer = self._source.layer(index)
        return LayerWeights(**{name: as_floats(getattr(layer, name)) for name in LayerWeights.__slots__})
