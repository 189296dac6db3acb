"""The forward pass of Llama 3 and Qwen3: one file, read from top to bottom.

    x = embedding of the ids
    for every layer:
        x += O(attention(RoPE(q, k), v))     of RMSNorm(x); Qwen3 also norms each head of q and k
        x += down(silu(gate) * up)           of RMSNorm(x)
    logits = head(RMSNorm(x))

Source: Touvron et al. 2023, arXiv:2302.13971; Qwen3 technical report, arXiv:2505.09388.
"""

from dataclasses import dataclass
from typing import Any

from service.model.config import ModelConfig
from service.model.quantization import KEEP, Quantization
from service.model.rope import rope_table
from service.model.weights import LayerWeights, WeightSource
from service.progress import Progress
from service.tensor.backend import Array, Backend, Linear, StepArrays


@dataclass(slots=True, frozen=True)
class Layer:
    """One decoder layer's weights, as the backend keeps them."""

    qkv: Linear  # with the RMSNorm before it
    q_norm: Array | None
    k_norm: Array | None
    o: Linear
    gate_up: Linear  # with the RMSNorm before it
    down: Linear


@dataclass(slots=True, frozen=True)
class KVCache:
    """Keys and values of all layers. Shapes: each [num_blocks, kv_heads, block_size, head_dim]."""

    keys: list[Array]
    values: list[Array]


@dataclass(slots=True, frozen=True)
class Activations:
    """Buffers of the widest step; a step works on their leading rows."""

    x: Array  # [rows, dim]: the residual stream
    q: Array  # [rows, heads, head_dim]
    mixed: Array  # [rows, heads, head_dim]: attention's output
    hidden: Array  # [rows, ffn]


class Decoder:
    """Weights on a device, and the stages of a step over them."""

    def __init__(
        self,
        config: ModelConfig,
        weights: WeightSource,
        backend: Backend,
        max_model_len: int,
        progress: Progress,
        quantization: Quantization = KEEP,
    ) -> None:
        """Load the weights. `max_model_len`: positions that will be asked for."""
        self.config = config
        self._backend = backend
        in_layers, embedding_group = quantization.group_size, quantization.embedding_group_size
        self._embedding = backend.linear([weights.embedding()], group_size=embedding_group)
        head = weights.head()
        self._head = (
            self._embedding
            if head is None
            else backend.linear([head], group_size=quantization.head_group_size)
        )
        self._final_norm = backend.vector(weights.final_norm())
        self._layers = []
        for index in range(config.num_layers):
            self._layers.append(_load_layer(weights.layer(index), backend, config, in_layers))
            progress.update(index + 1, config.num_layers, "layers")
        self._rope = backend.vector(rope_table(config.rope, config.head_dim, max_model_len))
        self._scale = config.head_dim**-0.5

    @property
    def linears(self) -> list[Linear]:
        """Every projection of a step, in order; what a step reads of weights."""
        layers = ((layer.qkv, layer.o, layer.gate_up, layer.down) for layer in self._layers)
        return [*(linear for layer in layers for linear in layer), self._head]

    def new_cache(self, num_blocks: int, block_size: int) -> KVCache:
        """Zeroed blocks for every layer."""
        config, backend = self.config, self._backend
        shape = (num_blocks, config.kv_heads, block_size, config.head_dim)
        keys, values = (
            [backend.zeros(shape, backend.activation_dtype) for _ in range(config.num_layers)]
            for _ in range(2)
        )
        return KVCache(keys, values)

    def new_activations(self, rows: int) -> Activations:
        """Buffers for steps of up to `rows` rows."""
        config, backend = self.config, self._backend
        per_head = (rows, config.heads, config.head_dim)
        return Activations(
            x=backend.empty((rows, config.dim), backend.activation_dtype),
            q=backend.empty(per_head, backend.activation_dtype),
            mixed=backend.empty(per_head, backend.activation_dtype),
            hidden=backend.empty((rows, config.ffn), backend.activation_dtype),
        )

    def forward(
        self, batch: StepArrays, cache: KVCache, buffers: Activations, last_ids: Array, logits: Array
    ) -> None:
        """Compute the logits of `batch.sample_rows`, and K and V of all rows.

        Shapes: last_ids int32 [max_running]; logits float32 [num_samples, vocab].
        Writes: logits, the batch's slots of `cache`, `buffers`.
        """
        backend, eps = self._backend, self.config.rms_norm_eps
        rows = len(batch.token_ids)
        x, q, mixed, hidden = (
            buffer[:rows] for buffer in (buffers.x, buffers.q, buffers.mixed, buffers.hidden)
        )
        backend.embed(batch, self._embedding, last_ids, x)
        for layer, keys, values in zip(self._layers, cache.keys, cache.values, strict=True):
            backend.qkv_rope_cache(
                x,
                eps,
                layer.qkv,
                layer.q_norm,
                layer.k_norm,
                self._rope,
                batch,
                keys,
                values,
                q,
            )
            backend.paged_attention(q, keys, values, batch, self._scale, mixed)
            backend.linear_add(mixed.reshape(rows, -1), layer.o, x)
            backend.gate_up_silu(x, eps, layer.gate_up, hidden)
            backend.linear_add(hidden, layer.down, x)
        self.logits(batch, buffers, logits)

    def logits(self, batch: StepArrays, buffers: Activations, logits: Array) -> None:
        """Logits of `batch.sample_rows` again, or of other rows of the step that `forward` has just run.

        Shapes: logits float32 [num_samples, vocab].
        """
        x = buffers.x[: len(batch.token_ids)]
        eps = self.config.rms_norm_eps
        self._backend.head_logits(x, self._final_norm, eps, self._head, batch, logits)


def _load_layer(
    weights: LayerWeights, backend: Backend, config: ModelConfig, group_size: int | None
) -> Layer:
    def vector(host: Any) -> Array | None:
        return None if host is None else backend.vector(host)

    def biases(host: Any) -> Any:
        return None if host is None else [host]

    def linear(*arguments: Any, **layout: Any) -> Linear:
        return backend.linear(*arguments, **layout, group_size=group_size)

    return Layer(
        qkv=linear(weights.qkv, weights.qkv_bias, weights.input_norm, pairs=config.head_dim // 2),
        q_norm=vector(weights.q_norm),
        k_norm=vector(weights.k_norm),
        o=linear([weights.o], biases(weights.o_bias)),
        gate_up=linear(weights.gate_up, weights.gate_up_bias, weights.post_norm, pairs=config.ffn),
        down=linear([weights.down], biases(weights.down_bias)),
    )
