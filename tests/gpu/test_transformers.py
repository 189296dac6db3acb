"""Whole models of real shapes with random weights, against transformers on the same device."""

from typing import Any

import numpy as np
import pytest
from ml_dtypes import bfloat16
from msgspec.structs import replace

from benchmarks.shapes import LLAMA_1B, QWEN3_8B
from service.model.config import ModelConfig
from service.model.decoder import Decoder
from service.model.weights import LayerWeights
from service.progress import NoProgress
from service.tensor.backend import StepArrays
from tests.gpu import cases

pytestmark = pytest.mark.gpu

PROMPT, DECODED, BLOCK = 200, 8, 16
LLAMA = replace(LLAMA_1B, max_positions=1024)
QWEN = replace(QWEN3_8B, max_positions=1024, num_layers=8)  # of 36, all alike


def make_model(config: ModelConfig) -> Any:
    """A transformers model in bfloat16 on the device, its norm weights far from one."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    torch.manual_seed(0)
    is_llama = config.architecture == "llama"
    described: Any = (LlamaConfig if is_llama else Qwen3Config)(
        vocab_size=config.vocab_size,
        hidden_size=config.dim,
        intermediate_size=config.ffn,
        num_hidden_layers=config.num_layers,
        num_attention_heads=config.heads,
        num_key_value_heads=config.kv_heads,
        head_dim=config.head_dim,
        max_position_embeddings=config.max_positions,
        rms_norm_eps=config.rms_norm_eps,
        rope_parameters={"rope_type": "default", "rope_theta": config.rope.theta},
        tie_word_embeddings=config.tied_embeddings,
    )
    with torch.device("cuda"):
        model: Any = (LlamaForCausalLM if is_llama else Qwen3ForCausalLM)(described)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
    convert(model, torch.bfloat16)
    return model.eval()


def convert(model: Any, dtype: Any) -> None:
    """Its parameters alone: `Module.to` would round the frequencies of the rotation too, for good."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)


class TorchWeights:
    """A WeightSource over a transformers model."""

    def __init__(self, model: Any, config: ModelConfig) -> None:
        self._tensors = dict(model.named_parameters())
        self._config = config

    def _get(self, name: str) -> Any:
        import torch

        host = self._tensors[name].detach().cpu().contiguous()
        return host.view(torch.int16).numpy().view(bfloat16)

    def embedding(self) -> Any:
        return self._get("model.embed_tokens.weight")

    def head(self) -> Any:
        return None if self._config.tied_embeddings else self._get("lm_head.weight")

    def final_norm(self) -> Any:
        return self._get("model.norm.weight")

    def layer(self, index: int) -> LayerWeights:
        def get(part: str) -> Any:
            return self._get(f"model.layers.{index}.{part}.weight")

        has_norms = self._config.qk_norm
        return LayerWeights(
            input_norm=get("input_layernorm"),
            qkv=tuple(get(f"self_attn.{name}_proj") for name in "qkv"),
            qkv_bias=None,
            q_norm=get("self_attn.q_norm") if has_norms else None,
            k_norm=get("self_attn.k_norm") if has_norms else None,
            o=get("self_attn.o_proj"),
            o_bias=None,
            post_norm=get("post_attention_layernorm"),
            gate_up=(get("mlp.gate_proj"), get("mlp.up_proj")),
            gate_up_bias=None,
            down=get("mlp.down_proj"),
            down_bias=None,
        )


def our_logits(backend: Any, weights: TorchWeights, config: ModelConfig, ids: Any) -> Any:
    """Of every position: the prompt in one step, then a step for each id."""
    import cupy

    decoder = Decoder(config, weights, backend, config.max_positions, NoProgress())
    cache, buffers = decoder.new_cache(64, BLOCK), decoder.new_activations(PROMPT)
    last_ids = cupy.zeros(1, np.int32)
    rows = []
    for start, stop in [(0, PROMPT), *((i, i + 1) for i in range(PROMPT, PROMPT + DECODED))]:
        positions = np.arange(start, stop, dtype=np.int32)
        count = stop - start
        step = StepArrays(
            token_ids=ids[start:stop].astype(np.int32),
            positions=positions,
            slot_mapping=positions,
            row_starts=np.array([0, count], np.int32),
            context_lens=np.array([stop], np.int32),
            block_tables=np.arange(16, dtype=np.int32)[None],
            lanes=np.zeros(1, np.int32),
            sample_rows=np.arange(count, dtype=np.int32),
            sample_lanes=np.zeros(count, np.int32),
            num_decode=int(start > 0),
        )
        logits = cases.poisoned((count, config.vocab_size), np.float32)
        decoder.forward(cases.on_device(step), cache, buffers, last_ids, logits)
        rows.append(logits.get())
    return np.concatenate(rows)


@pytest.mark.parametrize("config", [LLAMA, QWEN], ids=lambda config: config.architecture)
def test_logits_are_as_near_to_float32_as_those_of_transformers(backend: Any, config: ModelConfig) -> None:
    import torch

    model = make_model(config)
    ids = np.random.default_rng(0).integers(0, config.vocab_size, PROMPT + DECODED)
    with torch.no_grad():
        given = torch.tensor(ids[None], device="cuda")
        ours = our_logits(backend, TorchWeights(model, config), config, ids)
        in_bfloat16 = model(given).logits[0].float().cpu().numpy()
        convert(model, torch.float32)
        exact = model(given).logits[0].cpu().numpy()

    for part, rows in (("prefill", slice(0, PROMPT)), ("decode", slice(PROMPT, None))):
        wanted = exact[rows]
        found, theirs = (
            float(np.linalg.norm(logits[rows] - wanted) / np.linalg.norm(wanted))
            for logits in (ours, in_bfloat16)
        )
        print(f"{config.architecture} {part}: {found:.2e}, transformers in bfloat16 {theirs:.2e}")
        assert found < 2 * theirs
    del model
    torch.cuda.empty_cache()
