"""Text to ids and back, over a `tokenizers` tokenizer.

Control tokens are those that the tokenizer marks as special. Text from users must not become one, so
`guard` replaces their texts by aliases: further tokens of this tokenizer, with names drawn at start that
nobody can type. Text around an alias is cut and encoded exactly as around a control token, and the alias
itself becomes the ids that the control token's text has as ordinary text.
"""

import json
import re
import secrets
from functools import lru_cache
from typing import Any

import tokenizers

from service.errors import ModelError
from service.model.checkpoint import TokenizerSpec

# In characters; half a millisecond or so. The package's `encode` keeps the interpreter locked, 0.7 s for a
# megabyte of English; for a batch it does not, but 0.1 ms go into handing it to threads of its own.
LONG_TEXT = 2_000


class Tokenizer:
    """One model's tokenizer. Never changes after construction, so threads may share it.

    Raises: ModelError (on construction) when the JSON is no tokenizer.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        self._tokenizer = _parse(spec)
        added = self._tokenizer.get_added_tokens_decoder()
        self._added = {token_id: token.content for token_id, token in added.items()}
        self._control_ids = {each.content: i for i, each in added.items() if each.special and each.content}
        self.special_ids = frozenset(self._control_ids.values())
        known = set(self._tokenizer.get_vocab(with_added_tokens=True).values())
        self.vocab_size = 1 + max(known, default=-1)
        kinds = _decoder_kinds(self._tokenizer.decoder)
        self.is_byte_level = kinds == ["ByteLevel"]  # a token is a fixed run of bytes
        self._has_byte_letters = "ByteLevel" in kinds
        self.bos_token, self.eos_token = spec.bos_token, spec.eos_token
        self._prefix = self._prompt_prefix(spec)
        longest_first = sorted(self._control_ids, key=len, reverse=True)
        self._control = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        # digits: no filter of a template changes them, and JSON has no escapes for them
        self._secret = f"{secrets.randbits(128):039d}"
        self._alias_of: dict[str, str] = {}
        self._ids_of_alias: dict[int | None, list[int]] = {}
        # ids of aliases must not hide ids beyond a gap from `decode`
        self._encoder = self._tokenizer if len(known) == self.vocab_size else _parse(spec)
        self._add_aliases(known)
        self._alias = re.compile("|".join(self._alias_of.values()) or r"(?!)")
        self._text_of_alias = {alias: text for text, alias in self._alias_of.items()}

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """Ids of the text alone; nothing is added. Half surrogate pairs are encoded as U+FFFD."""
        if not allow_special:
            text = self.guard(text)
        text = well_formed(text)
        if len(text) < LONG_TEXT:
            ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
        else:
            ids = self._encoder.encode_batch_fast([text], add_special_tokens=False)[0].ids
        if self._secret not in text:
            return ids
        return [each for token_id in ids for each in self._ids_of_alias.get(token_id, (token_id,))]

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt: BOS first if the tokenizer asks for it, and not twice if it is typed."""
        ids = self.encode(text)
        return ids if ids[: len(self._prefix)] == self._prefix else [*self._prefix, *ids]

    def guard(self, text: str) -> str:
        """`text` with aliases for all texts of control tokens in it; mostly `text` itself."""
        return self._control.sub(lambda found: self._alias_of[found[0]], text)

    def unguard(self, text: str) -> str:
        """Undo `guard`."""
        return self._alias.sub(lambda found: self._text_of_alias[found[0]], text)

    def control_id(self, text: str) -> int | None:
        """The id of the control token whose text this is."""
        return self._control_ids.get(text)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; what is no character becomes U+FFFD."""
        if len(ids) < LONG_TEXT:
            text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        else:  # for a batch the interpreter is not kept locked
            text = self._tokenizer.decode_batch([ids], skip_special_tokens=skip_special_tokens)[0]
        return text

    def token_name(self, token_id: int) -> str:
        """The token as the vocabulary spells it; empty for an id that does not exist."""
        if not 0 <= token_id < self.vocab_size:  # above are the aliases, which nobody may learn
            return ""
        return self._added.get(token_id) or self._tokenizer.id_to_token(token_id) or ""

    @lru_cache(maxsize=1 << 16)  # noqa: B019  # one tokenizer lives as long as the server
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id that does not exist."""
        if not 0 <= token_id < self.vocab_size:
            return b""
        token = self._added.get(token_id) or self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if not self._has_byte_letters:
            return _piece_bytes(token)
        if all(letter in _BYTE_OF_LETTER for letter in token):
            return bytes(_BYTE_OF_LETTER[letter] for letter in token)
        return token.encode()

    def _prompt_prefix(self, spec: TokenizerSpec) -> list[int]:
        bos_id = None if spec.bos_token is None else self._tokenizer.token_to_id(spec.bos_token)
        if spec.add_bos_token is not None:
            return [] if bos_id is None or not spec.add_bos_token else [bos_id]
        processed = self._tokenizer.encode("", add_special_tokens=True).ids
        return [bos_id] if bos_id is not None and processed[:1] == [bos_id] else []

    def _add_aliases(self, known: set[int]) -> None:
        num_gaps = self.vocab_size - len(known)  # ids that `tokenizers` may give to an alias again
        names = [f"{self._secret}{i:09d}" for i in range(len(self._control_ids) + num_gaps)]
        ordinary = {text: self._ordinary_ids(text) for text in self._control_ids}
        self._encoder.add_tokens(
            [tokenizers.AddedToken(name, normalized=False, special=False) for name in names]
        )
        usable = [name for name in names if self._encoder.token_to_id(name) not in known]
        for text, name in zip(self._control_ids, usable, strict=False):
            self._alias_of[text] = name
            self._ids_of_alias[self._encoder.token_to_id(name)] = ordinary[text]

    def _ordinary_ids(self, text: str) -> list[int]:
        self._encoder.encode_special_tokens = True
        try:
            ids: list[int] = self._encoder.encode(text, add_special_tokens=False).ids
            if not self.special_ids.isdisjoint(ids):  # a word of the vocabulary, too: spell it
                spelt = (self._encoder.encode(letter, add_special_tokens=False).ids for letter in text)
                ids = [each for letter in spelt for each in letter if each not in self.special_ids]
            return ids
        finally:
            self._encoder.encode_special_tokens = False


def _parse(spec: TokenizerSpec) -> tokenizers.Tokenizer:
    try:
        parsed = tokenizers.Tokenizer.from_str(spec.tokenizer_json)
    except Exception as error:  # the package raises bare Exception
        raise ModelError(f"tokenizer.json can't be used: {error}") from None
    # the checkpoint may call tokens special that tokenizer.json does not
    added = {token.content: token for token in parsed.get_added_tokens_decoder().values()}
    for text in spec.special_tokens:
        if text in added and not added[text].special:
            added[text].special = True
            parsed.add_special_tokens([added[text]])
    return parsed


def well_formed(text: str) -> str:
    """`text` with U+FFFD for each half of a surrogate pair, which is no character."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")
    return text


def _decoder_kinds(decoder: Any) -> list[str]:
    """Types of the steps from tokens to text, in order."""
    if decoder is None:
        return []
    state = json.loads(decoder.__getstate__())
    return [step["type"] for step in state.get("decoders", [state])]


def _letters_of_bytes() -> dict[str, int]:
    """GPT-2's reversible mapping: printable bytes stand for themselves, others for letters from U+0100 on.

    Source: Radford et al. 2019, the released encoder of GPT-2.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


_BYTE_OF_LETTER = _letters_of_bytes()


def _piece_bytes(token: str) -> bytes:
    """A SentencePiece token: <0xNN> is a byte, U+2581 a space."""
    if re.fullmatch(r"<0x[0-9A-F]{2}>", token):
        return bytes([int(token[3:5], 16)])
    return token.replace("\u2581", " ").encode()
