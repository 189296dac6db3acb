"""Tokenizers and chat templates for tests of the text layer."""

from functools import cache
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from service.model.checkpoint import TokenizerSpec
from service.settings import Settings
from service.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog says: what is the capital of France?",
    "user\nassistant\nsystem\nYou are a helpful assistant. The answer is 42.\n\n",
    "für Frédéric 日本語の文章 \U0001f355 <|im_start|><|im_end|><think>\n\n</think>",
]
CHATML = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# After the formats that Meta and Qwen describe: BOS from the template and texts trimmed; reasoning cut out
# of the history and an empty one before the last answer.
LLAMA3 = (
    "{{- bos_token }}{% for message in messages %}"
    "{{- '<|start_header_id|>' + message.role + '<|end_header_id|>\n\n' }}"
    "{{- message.content | trim + '<|eot_id|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"
)
# After the prompt format that Meta describes for tools as JSON: they stand in the user's first message.
LLAMA3_WITH_TOOLS = """
{{- bos_token }}
{%- set ns = namespace(tools_are_due=(tools is not none and tools)) %}
{%- for message in messages %}
    {%- set role = 'ipython' if message.role == 'tool' else message.role %}
    {{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' }}
    {%- if message.role == 'user' and ns.tools_are_due %}
        {%- set ns.tools_are_due = false %}
        {{- 'These functions can be called. To call one, reply with nothing but JSON in this form: ' }}
        {{- '{"name": name of the function, "parameters": object of its arguments}.\\n\\n' }}
        {%- for tool in tools %}{{- tool | tojson(indent=4) + '\\n\\n' }}{% endfor %}
    {%- endif %}
    {%- if message.tool_calls %}
        {%- if message.tool_calls | length > 1 %}
            {{- raise_exception('Only one call at a time is possible.') }}
        {%- endif %}
        {%- set call = message.tool_calls[0].function %}
        {{- '{"name": "' + call.name + '", "parameters": ' + call.arguments | tojson + '}' }}
    {%- elif message.role == 'tool' %}
        {{- message.content | tojson if message.content is not string else message.content }}
    {%- else %}
        {{- message.content | trim }}
    {%- endif %}
    {{- '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}
{%- endif %}
"""
QWEN3 = """
{%- if messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- set content = message.content if message.content is string else '' %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first) %}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' }}
    {%- elif message.role == 'assistant' %}
        {%- if '</think>' in content %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {{- '<|im_start|>assistant\\n' }}
        {%- if loop.last %}{{- '<think>\\n\\n</think>\\n\\n' }}{% endif %}
        {{- content + '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {{- '<|im_start|>user\\n<tool_response>\\n' + content + '\\n</tool_response><|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""
TEMPLATES = {"chatml": CHATML, "llama3": LLAMA3, "qwen3": QWEN3}
CHATML_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
LLAMA3_TOKENS = (
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|eot_id|>",
)
THINK_TOKENS = ("<think>", "</think>")  # of the vocabulary, but no control tokens


@cache
def byte_level_json(special: tuple[str, ...] = CHATML_TOKENS, adds_bos: bool = False) -> str:
    """A byte-level BPE of about 450 tokens. `adds_bos`: its post-processor puts special[0] first."""
    raw = tokenizers.Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=450, initial_alphabet=alphabet, show_progress=False)
    raw.train_from_iterator(CORPUS * 3, trainer)
    raw.add_special_tokens([AddedToken(text, normalized=False) for text in special])
    raw.add_tokens([AddedToken(text, normalized=False) for text in THINK_TOKENS])
    if adds_bos:
        bos = (special[0], raw.token_to_id(special[0]))
        raw.post_processor = processors.TemplateProcessing(single=f"{special[0]} $A", special_tokens=[bos])
    text: str = raw.to_str()
    return text


@cache
def make_tokenizer(family: str = "chatml") -> Tokenizer:
    """Of "chatml" (no BOS), "llama3" (BOS from the post-processor), "qwen3", "pieces", "letters" (a, b, c
    and nothing else) or "smollm2"."""
    if family == "smollm2":
        return Tokenizer(smollm2_spec())
    if family == "pieces":
        return Tokenizer(spec_of(pieces_json(), "<s>", "</s>"))
    if family == "letters":
        raw = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "c": 2}, []))
        raw.decoder = decoders.ByteLevel()
        return Tokenizer(spec_of(raw.to_str()))
    if family == "llama3":
        return Tokenizer(
            spec_of(byte_level_json(LLAMA3_TOKENS, adds_bos=True), LLAMA3_TOKENS[0], "<|eot_id|>")
        )
    return Tokenizer(spec_of(byte_level_json(), eos="<|im_end|>"))


def spec_of(
    document: str, bos: str | None = None, eos: str | None = None, add_bos: bool | None = None
) -> TokenizerSpec:
    return TokenizerSpec(tokenizer_json=document, bos_token=bos, eos_token=eos, add_bos_token=add_bos)


def pieces_json() -> str:
    """Llama 2's kind: words with U+2581 for spaces, and tokens <0xNN> for what the vocabulary lacks."""
    words = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words += [
        "\u2581",
        *"abcdehlorw.",
        "\u2581a",
        "he",
        "lo",
        "hello",
        "\u2581hello",
        "\u2581world",
        "\ufffd",
    ]
    merges = [("\u2581", "a"), ("h", "e"), ("l", "o")]
    vocab = {word: i for i, word in enumerate(words)}
    raw = tokenizers.Tokenizer(models.BPE(vocab, merges, byte_fallback=True))
    raw.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    raw.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    raw.add_special_tokens(["<unk>", "<s>", "</s>"])
    text: str = raw.to_str()
    return text


@cache
def smollm2_spec() -> TokenizerSpec:
    """Of the default model; the test is skipped where that was not fetched."""
    from service.model.checkpoint import open_checkpoint

    found: list[Path] = sorted(Settings().cache_path.rglob("SmolLM2-135M-Instruct.Q4_1.gguf"))
    if not found:
        pytest.skip("the default model is not in the cache: photoninfer pull")
    return open_checkpoint(found[0]).tokenizer
