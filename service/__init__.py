"""PhotonInfer: an OpenAI-compatible inference server for Llama 3 and Qwen3."""

__version__ = "0.1.0"
