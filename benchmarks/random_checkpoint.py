"""A checkpoint with random weights and a made-up tokenizer: `python -m benchmarks.random_checkpoint DIR`.

For measuring start and HTTP side of a server with a model of real size where none can be downloaded.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from ml_dtypes import bfloat16
from numpy.typing import NDArray
from safetensors.numpy import save_file

from benchmarks.shapes import MODELS
from service.model.config import ModelConfig
from service.model.quantize import config_json
from service.model.weights import wanted_shapes


def tensor(shape: tuple[int, ...], noise: NDArray[Any]) -> NDArray[Any]:
    """The same noise again and again, scaled by the width; ones for norms."""
    if len(shape) == 1:
        return np.ones(shape, bfloat16)
    return np.resize((noise * np.float32(shape[1] ** -0.5)).astype(bfloat16), shape)


def write_tokenizer(folder: Path, vocab_size: int) -> None:
    """Bytes, and a word of its own for every other id."""
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*letters, "<|end|>", *(f"w{i}" for i in range(len(letters) + 1, vocab_size))]
    made = tokenizers.Tokenizer(tokenizers.models.BPE({word: i for i, word in enumerate(words)}, []))
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = tokenizers.decoders.ByteLevel()
    made.add_special_tokens(["<|end|>"])
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end|>"}))


def write(folder: Path, config: ModelConfig) -> None:
    folder.mkdir(parents=True)
    noise = np.random.default_rng(0).standard_normal((1 << 22) - 3, np.float32)
    tensors = {name: tensor(shape, noise) for name, shape in wanted_shapes(config).items()}
    save_file(tensors, folder / "model.safetensors")
    described = config_json(config, folder) | {"eos_token_id": 256}
    (folder / "config.json").write_text(json.dumps(described))
    write_tokenizer(folder, config.vocab_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model", choices=list(MODELS), default="llama-3.2-1b")
    options = parser.parse_args()
    write(options.folder, MODELS[options.model])


if __name__ == "__main__":
    main()
