"""transformers on the same GPU and shape: decode tokens/s of `generate`, greedy, bfloat16; prints JSON.

    python benchmarks/compare_transformers.py

Prompts of 128 random ids, 128 ids of output, as `benchmarks/device.py engine` measures PhotonInfer.
"""

import json
import time

import torch
from transformers import AutoModelForCausalLM, LlamaConfig

LLAMA_1B = LlamaConfig(
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=64,
    tie_word_embeddings=True,
    eos_token_id=None,
    bos_token_id=None,
    pad_token_id=0,
)


def main() -> None:
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(LLAMA_1B, dtype=torch.bfloat16).eval()
    for batch in (1, 16, 64):
        prompt = torch.randint(1000, 100_000, (batch, 128), device="cuda")
        options = {"do_sample": False, "attention_mask": torch.ones_like(prompt)}
        model.generate(prompt, max_new_tokens=8, **options)
        seconds = []
        for num_tokens in (1, 128):
            torch.cuda.synchronize()
            started_at = time.perf_counter()
            model.generate(prompt, max_new_tokens=num_tokens, min_new_tokens=num_tokens, **options)
            torch.cuda.synchronize()
            seconds.append(time.perf_counter() - started_at)
        rate = batch * 127 / (seconds[1] - seconds[0])
        print(json.dumps({"batch": batch, "tokens_per_second": round(rate), "ttft_ms": 1000 * seconds[0]}))


if __name__ == "__main__":
    main()
