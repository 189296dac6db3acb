"""The real engine on a fake model, a real tokenizer, and all between them and HTTP."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import tokenizers
from tokenizers import AddedToken, decoders, models, pre_tokenizers

from openai_api.api import Api
from openai_api.health import Health
from service.engine.engine import Engine
from service.metrics import Metrics
from service.model.checkpoint import TokenizerSpec
from service.model.config import SamplingDefaults
from service.text.chat_template import ChatTemplate
from service.text.generation import TextGenerator
from service.text.matcher import Grammars
from service.text.tokenizer import Tokenizer
from tests.engine.fake_runner import VOCAB, FakeRunner
from tests.openai_api.scripted import MODEL

BLOCK = 4
SPECIAL = ["<|im_end|>", "<|im_start|>"]
LETTERS = "abcdefghijklmnopqrstuvwxyz .:?\n"
THINK_TAGS = ["<think>", "</think>"]
SIGNS = '{}",<>/_'  # for JSON and tags
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# as Qwen3's: thinking is left to the model, or off by an empty one in the prompt
THINKING_TEMPLATE = TEMPLATE + (
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}"
)
# calls in tags, as Qwen3's
TOOLS_TEMPLATE = TEMPLATE + "{% if tools %}{# <tool_call> arguments #}{{ tools | tojson }}{% endif %}"
THINKING_TOOLS_TEMPLATE = TOOLS_TEMPLATE + "{# </think> enable_thinking #}<think>\n"


def make_tokenizer() -> Tokenizer:
    """As many ids as the fake model has: specials, letters, the parts of an emoji, pairs of letters."""
    letter_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str
    texts = [letter_of(letter)[0][0] for letter in LETTERS + SIGNS]
    parts = list(letter_of("\U0001fae0")[0][0])
    tokens = [*SPECIAL, *THINK_TAGS, *texts, *parts]
    merges = list(pairwise(texts))[: VOCAB - len(tokens)]
    tokens += [first + second for first, second in merges]
    vocab = {token: token_id for token_id, token in enumerate(tokens)}
    raw = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens(SPECIAL)
    raw.add_tokens([AddedToken(tag, normalized=False) for tag in THINK_TAGS])
    return Tokenizer(
        TokenizerSpec(tokenizer_json=raw.to_str(), chat_template=TEMPLATE, eos_token=SPECIAL[0])
    )


@dataclass(slots=True)
class Whole:
    api: Api
    engine: Engine
    runner: FakeRunner

    @property
    def num_used_blocks(self) -> int:
        return self.api.metrics.gauges.num_used_blocks


@asynccontextmanager
async def whole_server(**options: Any) -> AsyncIterator[Whole]:
    """`template`: of chats. `max_model_len`, `max_waiting`: of the engine."""
    tokenizer, metrics = make_tokenizer(), Metrics()
    runner = FakeRunner(256, BLOCK, 8)
    engine = Engine(
        runner,
        num_blocks=256,
        block_size=BLOCK,
        max_model_len=options.pop("max_model_len", 200),
        vocab_size=VOCAB,
        eos_token_ids=(0,),
        max_step_tokens=32,
        max_running=8,
        max_waiting=options.pop("max_waiting", 100),
        observer=metrics,
    )
    template = ChatTemplate(options.pop("template", TEMPLATE), tokenizer)
    grammars = Grammars(tokenizer, VOCAB, [0])
    generator = TextGenerator(engine, tokenizer, template, SamplingDefaults(), grammars)
    health = Health(is_ready=True, engine_failure=lambda: engine.failure)
    await engine.start()
    try:
        yield Whole(Api([MODEL], generator, health, metrics), engine, runner)
    finally:
        await engine.stop()


def chat(text: str, **fields: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 20, **fields}
