"""Fields of the API that are not done here: which are refused, which change nothing. Data, also for docs.

Fields that are done are those of the structs in protocol.py. A field in none of the tables is unknown:
it is accepted, and listed in the reply's header X-Ignored-Params together with the harmless ones.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

import msgspec

from openai_api.json_body import shown
from service.errors import UnsupportedFieldError

HEADER = "X-Ignored-Params"
MAX_NAMES = 32
MAX_NAME_LENGTH = 64


class Refused(msgspec.Struct, frozen=True):
    """A field that would change the answer. Values in `allowed`, and null, ask for what is done anyway."""

    allowed: tuple[Any, ...] = ()
    remedy: str = ""


_GRAMMAR = Refused(remedy="Use response_format or structured_outputs.")
_SAMPLER = Refused(remedy="This way of sampling is not offered.")

_REFUSED_BY_BOTH: dict[str, Refused] = {
    "json_schema": _GRAMMAR,
    "grammar": _GRAMMAR,
    "logprobs_mode": Refused(
        ("raw_logprobs",), "Logprobs are the model's own, before penalties, temperature and truncation."
    ),
    "return_tokens_as_token_ids": Refused((False,)),
    "truncate_prompt_tokens": Refused((-1,), "Shorten the prompt on your side."),
    "allowed_token_ids": Refused(remedy="Use logit_bias."),
    "bad_words": Refused(([],), "Use logit_bias."),
    "logits_processors": Refused(([],)),
    "use_beam_search": Refused((False,), "Beam search is not offered."),
    "length_penalty": Refused((1.0, 1), "Beam search is not offered."),
    "early_stopping": Refused((False,), "Beam search is not offered."),
    "spaces_between_special_tokens": Refused((True,)),
    "detokenize": Refused((True,)),
    "kv_transfer_params": Refused(),
    "vllm_xargs": Refused(({},)),
    "repeat_penalty": Refused((1.0, 1), "Use repetition_penalty."),
    "n_predict": Refused((-1,), "Use max_tokens."),
    "typical_p": _SAMPLER,
    "mirostat": Refused((0,), "This way of sampling is not offered."),
    "top_a": _SAMPLER,
    "tfs_z": _SAMPLER,
    "xtc_probability": Refused((0, 0.0), "This way of sampling is not offered."),
    "dry_multiplier": Refused((0, 0.0), "This way of sampling is not offered."),
}

REFUSED_BY_CHAT: dict[str, Refused] = {
    **_REFUSED_BY_BOTH,
    "functions": Refused(([],), "Use tools, its newer form."),
    "function_call": Refused(("none", "auto"), "Use tool_choice, its newer form."),
    "modalities": Refused((["text"],), "Only text is generated."),
    "audio": Refused(remedy="Only text is generated."),
    "echo": Refused((False,), "Use /v1/completions, which has it."),
    "best_of": Refused((1,), "Use n and choose on your side."),
    "prediction": Refused(remedy="Predicted outputs are not offered."),
    "web_search_options": Refused(remedy="Web search is not offered."),
    "verbosity": Refused(("medium",), "Say in a message how long the answer should be."),
    "documents": Refused(([],), "Put the documents into a message."),
    "chat_template": Refused(remedy="The model's own chat template is used; render on your side and use "
                             "/v1/completions."),
    "mm_processor_kwargs": Refused(({},), "Only text is taken."),
    "media_io_kwargs": Refused(({},), "Only text is taken."),
    "add_special_tokens": Refused((False,), "The chat template places special tokens."),
}  # fmt: skip

REFUSED_BY_COMPLETIONS: dict[str, Refused] = {
    **_REFUSED_BY_BOTH,
    "suffix": Refused(("",), "Inserting text is not offered."),
    "top_logprobs": Refused((0,), "On /v1/completions it is `logprobs`, a number."),
    "add_special_tokens": Refused((True,), "Send the prompt as token ids instead."),
    "prompt_embeds": Refused(remedy="Send the prompt as text or token ids."),
}

_OF_CHATS = Refused(remedy="Use /v1/chat/completions, which has it.")

REFUSED_BY_RESPONSES: dict[str, Refused] = {
    "previous_response_id": Refused(remedy="Responses are not stored; send the whole history as input."),
    "conversation": Refused(remedy="Conversations are not stored; send the whole history as input."),
    "prompt": Refused(remedy="Prompts are not stored; send the text itself."),
    "background": Refused((False,), "Responses are not stored, so they can't be fetched later."),
    "truncation": Refused(("disabled",), "Shorten the input on your side."),
    "top_logprobs": Refused((0,), "Use /v1/chat/completions, which has logprobs."),
    "include": Refused(([], ["reasoning.encrypted_content"]), "There is nothing more to include."),
    "messages": _OF_CHATS,
    "response_format": Refused(remedy="Use text.format."),
    "max_tokens": Refused(remedy="Use max_output_tokens."),
    "reasoning_effort": Refused(remedy="Use reasoning.effort."),
    "n": Refused((1,), "Use /v1/chat/completions, which has it."),
    **dict.fromkeys(
        ("stop", "seed", "logit_bias", "presence_penalty", "frequency_penalty", "repetition_penalty",
         "top_k", "min_p", "logprobs", "prompt_logprobs", "guided_json", "guided_regex", "guided_choice",
         "guided_grammar", "structured_outputs"),
        _OF_CHATS,
    ),
}  # fmt: skip

# accepted without effect; each with what a user should know
HARMLESS: dict[str, str] = {
    "user": "not used",
    "safety_identifier": "not used",
    "metadata": "not stored",
    "store": "nothing is stored",
    "service_tier": "there is one tier",
    "prompt_cache_key": "the prefix cache needs no key",
    "prompt_cache_retention": "the prefix cache evicts by use",
}


def ignored_fields(
    body: Mapping[str, Any], done: Iterable[str], refused: Mapping[str, Refused]
) -> list[str]:
    """Names of the given fields that have no effect.

    Raises: UnsupportedFieldError for a field that would change the answer.
    """
    ignored = []
    for name in body.keys() - set(done):
        value = body[name]
        if value is None:
            continue  # null always means absent
        rule = refused.get(name)
        if rule is None:
            ignored.append(name)
            continue
        if not any(_is_same(value, each) for each in rule.allowed):
            text = f"{name} = {shown(value)} is not supported. {rule.remedy}"
            raise UnsupportedFieldError(text.rstrip(), field=name)
    return sorted(ignored)


def _is_same(value: Any, allowed: Any) -> bool:
    """Equal as JSON, where true is not 1."""
    return bool(value == allowed) and isinstance(value, bool) == isinstance(allowed, bool)


def header_value(names: Iterable[str]) -> str:
    """Names for the header: bounded in number and length, nothing but visible ASCII of names."""
    clean = [re.sub(r"[^A-Za-z0-9_.;=\[\]-]", "?", name)[:MAX_NAME_LENGTH] for name in names]
    more = ["..."] if len(clean) > MAX_NAMES else []
    return ", ".join(clean[:MAX_NAMES] + more)
