"""A model's tensors by shape alone: enough to know which kernels it needs, without its weights."""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from service.model.config import ModelConfig
from service.model.weights import EMBEDDING, HEAD, LayerWeights, layer_name


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor without elements. `group_size`: of INT8, or None."""

    shape: tuple[int, ...]
    group_size: int | None = None

    def __len__(self) -> int:
        return self.shape[0]


class ShapeWeights:
    """A WeightSource whose projections are shapes; norms are ones."""

    def __init__(self, config: ModelConfig, group_sizes: Mapping[str, int] = MappingProxyType({})) -> None:
        """`group_sizes`: of tensors in INT8, by name."""
        self._config = config
        self._group_sizes = group_sizes

    def _matrix(self, name: str, *shape: int) -> Any:
        return Shape(shape, self._group_sizes.get(name))

    def embedding(self) -> Any:
        return self._matrix(EMBEDDING, self._config.vocab_size, self._config.dim)

    def head(self) -> Any:
        config = self._config
        return None if config.tied_embeddings else self._matrix(HEAD, config.vocab_size, config.dim)

    def final_norm(self) -> Any:
        return np.ones(self._config.dim, np.float32)

    def layer(self, index: int) -> LayerWeights:
        config = self._config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim

        def linear(part: str, rows: int, columns: int) -> Any:
            return self._matrix(layer_name(index, f"{part}.weight"), rows, columns)

        gate_up: Any = tuple(linear(f"mlp.{part}_proj", config.ffn, config.dim) for part in ("gate", "up"))
        gate_up = _uniform(gate_up)
        sizes = {"q": queries, "k": keys, "v": keys}
        qkv: Any = tuple(linear(f"self_attn.{p}_proj", rows, config.dim) for p, rows in sizes.items())
        o, down = (
            linear("self_attn.o_proj", config.dim, queries),
            linear("mlp.down_proj", config.dim, config.ffn),
        )
        head_norm: Any = np.ones(config.head_dim, np.float32) if config.qk_norm else None
        return LayerWeights(
            input_norm=self.final_norm(),
            qkv=_uniform(qkv),
            qkv_bias=_zeros(qkv) if config.qkv_bias else None,
            q_norm=head_norm,
            k_norm=head_norm,
            o=o,
            o_bias=_zeros((o,))[0] if config.o_bias else None,
            post_norm=self.final_norm(),
            gate_up=gate_up,
            gate_up_bias=_zeros(gate_up) if config.mlp_bias else None,
            down=down,
            down_bias=_zeros((down,))[0] if config.mlp_bias else None,
        )


def _uniform(parts: Any) -> Any:
    """As uniform of service/model/weights.py does."""
    is_uniform = len({part.group_size for part in parts}) == 1
    return parts if is_uniform else tuple(Shape(part.shape) for part in parts)


def _zeros(parts: tuple[Shape, ...]) -> Any:
    return tuple(np.zeros(len(part), np.float32) for part in parts)
