"""Walks through grammars, token by token, as the engine would."""

import asyncio
import json
import random
from typing import Any

import numpy as np

from service.engine.constraint import Constraint
from service.text.grammar import GrammarSpec
from service.text.matcher import Grammars, Matcher
from service.text.tokenizer import Tokenizer


def spec(kind: Any, value: Any, field: str = "field") -> GrammarSpec:
    """`value`: a text, or what is to be written as JSON."""
    return GrammarSpec(kind=kind, text=value if isinstance(value, str) else json.dumps(value), field=field)


def compiled(grammars: Grammars, kind: str, value: Any) -> Matcher:
    return asyncio.run(grammars.compile(spec(kind, value)))


def allowed_ids(constraint: Constraint, vocab_size: int) -> list[int]:
    row = np.zeros(-(-vocab_size // 32), np.uint32)
    constraint.fill_mask(row)
    bits = np.unpackbits(row.view(np.uint8), bitorder="little")
    return [int(token_id) for token_id in np.flatnonzero(bits)]


def accepts(matcher: Matcher, tokenizer: Tokenizer, eos: int, text: str) -> bool:
    """Whether exactly this text may be the reply."""
    place = matcher.copy()
    for token_id in tokenizer.encode(text, allow_special=False):
        if place.is_over or token_id not in allowed_ids(place, tokenizer.vocab_size):
            return False
        place.advance(token_id)
    return place.is_over or eos in allowed_ids(place, tokenizer.vocab_size)


def random_text(
    constraint: Constraint, tokenizer: Tokenizer, eos: int, seed: int, max_tokens: int = 400
) -> str | None:
    """A reply of random allowed ids, which ends where it may; None if it does not come to an end."""
    chosen, ids = random.Random(seed), list[int]()
    while not constraint.is_over:
        allowed = allowed_ids(constraint, tokenizer.vocab_size)
        if eos in allowed:
            break
        if len(ids) == max_tokens:
            return None
        ids.append(chosen.choice(allowed))
        constraint.advance(ids[-1])
        assert constraint.failure is None
    return b"".join(map(tokenizer.token_bytes, ids)).decode()
