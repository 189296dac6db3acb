"""A model's tensors by shape alone: enough to know which kernels it needs, without its weights."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from service.model.config import ModelConfig
from service.model.weights import LayerWeights


@dataclass(frozen=True, slots=True)
class Shape:
    """A tensor without elements."""

    shape: tuple[int, ...]

    def __len__(self) -> int:
        return self.shape[0]


class ShapeWeights:
    """A WeightSource whose projections are shapes; norms are ones."""

    def __init__(self, config: ModelConfig) -> None:
        self._config = config

    def embedding(self) -> Any:
        return Shape((self._config.vocab_size, self._config.dim))

    def head(self) -> Any:
        return None if self._config.tied_embeddings else self.embedding()

    def final_norm(self) -> Any:
        return np.ones(self._config.dim, np.float32)

    def layer(self, index: int) -> LayerWeights:
        """All layers are alike."""
        config = self._config
        queries, keys = config.heads * config.head_dim, config.kv_heads * config.head_dim
        gate_up: Any = (Shape((config.ffn, config.dim)),) * 2
        qkv: Any = tuple(Shape((rows, config.dim)) for rows in (queries, keys, keys))
        o: Any = Shape((config.dim, queries))
        down: Any = Shape((config.dim, config.ffn))
        head_norm: Any = np.ones(config.head_dim, np.float32) if config.qk_norm else None
        return LayerWeights(
            input_norm=self.final_norm(),
            qkv=qkv,
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


def _zeros(parts: tuple[Shape, ...]) -> Any:
    return tuple(np.zeros(len(part), np.float32) for part in parts)
