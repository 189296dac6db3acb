"""Random tiny checkpoints written by transformers, and transformers' own logits of them."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
from numpy.typing import NDArray

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]

_SHAPE = {
    "vocab_size": 300,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "eos_token_id": 2,
    "bos_token_id": 1,
}


def _torch() -> Any:
    torch = pytest.importorskip("torch", reason="torch is not installed: pip install photoninfer[oracle]")
    torch.set_num_threads(1)  # two threads are many times slower than one on small virtual machines
    return torch


def make_checkpoint(
    directory: Path, kind: str = "llama", *, dtype: str = "float32", shard: str | None = None, **config: Any
) -> Path:
    """Write a random model of `kind` ("llama", "qwen3") with a tokenizer beside it. `config`: HF's fields.

    Norm weights are random too, so that a norm that is left out or done wrong changes the logits.
    """
    torch = _torch()
    from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

    model_class, config_class = {
        "llama": (LlamaForCausalLM, LlamaConfig),
        "qwen3": (Qwen3ForCausalLM, Qwen3Config),
    }[kind]
    torch.manual_seed(1)
    model = model_class(config_class(**{**_SHAPE, **config}))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.4, 1.8)
            elif parameter.ndim == 2:
                parameter.normal_(0, 0.15)
            else:
                parameter.normal_(0, 0.5)
    options = {} if shard is None else {"max_shard_size": shard}
    model.to(getattr(torch, dtype)).save_pretrained(directory, **options)
    write_tokenizer(directory)
    return directory


def oracle_logits(directory: Path, token_ids: list[int]) -> NDArray[np.float32]:
    """transformers' logits in float32. Shapes: [len(token_ids), vocab]."""
    torch = _torch()
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    with torch.no_grad():
        logits: NDArray[np.float32] = model(torch.tensor([token_ids])).logits[0].numpy()
    return logits


def write_tokenizer(directory: Path, vocab_size: int = 300) -> None:
    """A byte-level BPE tokenizer trained on a few words, and a ChatML template."""
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIALS,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(
        ["the cat sat on the mat", "hello world, hello there", "assistant user system"], trainer
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": None, "eos_token": "<|im_end|>", "chat_template": CHATML}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
