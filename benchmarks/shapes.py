"""Models by shape alone, for measurements and tests with random weights."""

from service.model.config import ModelConfig
from service.model.rope import RopeConfig

LLAMA_1B = ModelConfig(  # Llama 3.2 1B, but for the scaling of its rotation
    architecture="llama",
    dim=2048,
    ffn=8192,
    num_layers=16,
    heads=32,
    kv_heads=8,
    head_dim=64,
    vocab_size=128256,
    max_positions=131072,
    rms_norm_eps=1e-5,
    rope=RopeConfig(theta=500000.0),
    tied_embeddings=True,
)
QWEN3_8B = ModelConfig(
    architecture="qwen3",
    dim=4096,
    ffn=12288,
    num_layers=36,
    heads=32,
    kv_heads=8,
    head_dim=128,
    vocab_size=151936,
    max_positions=40960,
    rms_norm_eps=1e-6,
    rope=RopeConfig(theta=1000000.0),
    qk_norm=True,
)
MODELS = {"llama-3.2-1b": LLAMA_1B, "qwen3-8b": QWEN3_8B}
