"""Text to ids and back, over a `tokenizers` tokenizer.

Control tokens are those that the tokenizer marks as special. Text from users must not become one: encode
with `allow_special=False` reads such text as the ordinary characters it is made of.
"""

import json
import re
from functools import lru_cache

import tokenizers

from service.errors import ModelError
from service.model.checkpoint import TokenizerSpec


class Tokenizer:
    """One model's tokenizer. Thread-safe.

    Raises: ModelError (on construction) when the JSON is no tokenizer.
    """

    def __init__(self, spec: TokenizerSpec) -> None:
        try:
            self._tokenizer = tokenizers.Tokenizer.from_str(spec.tokenizer_json)
            self._plain = tokenizers.Tokenizer.from_str(spec.tokenizer_json)
        except Exception as error:  # the package raises bare Exception
            raise ModelError(f"tokenizer.json can't be used: {error}") from None
        self._plain.encode_special_tokens = True
        added = self._tokenizer.get_added_tokens_decoder()
        self._special_ids = {token.content: token_id for token_id, token in added.items() if token.special}
        self._added = {token_id: token.content for token_id, token in added.items()}
        self.special_ids = frozenset(self._special_ids.values())
        self.vocab_size = 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values(), default=-1)
        self.is_byte_level = _has_byte_level(json.loads(spec.tokenizer_json).get("decoder"))
        longest_first = sorted(self._special_ids, key=len, reverse=True)
        self.special_pattern = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self.bos_token, self.eos_token = spec.bos_token, spec.eos_token
        self._bos_id = None if spec.bos_token is None else self._tokenizer.token_to_id(spec.bos_token)
        self._adds_bos = self._decides_bos(spec)

    def encode(self, text: str, *, allow_special: bool = True) -> list[int]:
        """Ids of the text alone; nothing is added."""
        tokenizer = self._tokenizer if allow_special else self._plain
        ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def encode_prompt(self, text: str) -> list[int]:
        """Ids of a raw prompt: BOS first if the tokenizer asks for it, and not twice if it is typed."""
        ids = self.encode(text)
        if self._adds_bos and self._bos_id is not None and ids[:1] != [self._bos_id]:
            return [self._bos_id, *ids]
        return ids

    def encode_marked(self, text: str, mark: str) -> list[int]:
        """Ids of `text` without its `mark` characters; control tokens cut by a mark are ordinary text.

        The rest is encoded as `encode` would: control tokens split a text before anything else happens.
        """
        ids: list[int] = []
        start = 0
        for found in self.special_pattern.finditer(text):
            ids += self.encode(text[start : found.start()].replace(mark, ""), allow_special=False)
            ids.append(self._special_ids[found[0]])
            start = found.end()
        return ids + self.encode(text[start:].replace(mark, ""), allow_special=False)

    def decode(self, ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids; what is no character becomes U+FFFD."""
        text: str = self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)
        return text

    @lru_cache(maxsize=1 << 16)  # noqa: B019  # one tokenizer lives as long as the server
    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for; empty for an id that does not exist."""
        token = self._added.get(token_id) or self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        if not self.is_byte_level:
            return _piece_bytes(token)
        if all(letter in _BYTE_OF_LETTER for letter in token):
            return bytes(_BYTE_OF_LETTER[letter] for letter in token)
        return token.encode()

    def _decides_bos(self, spec: TokenizerSpec) -> bool:
        if spec.add_bos_token is not None:
            return spec.add_bos_token
        added = self._tokenizer.encode("", add_special_tokens=True).ids
        return self._bos_id is not None and added[:1] == [self._bos_id]


def _has_byte_level(decoder: object) -> bool:
    if not isinstance(decoder, dict):
        return False
    inner = decoder.get("decoders")
    if isinstance(inner, list):
        return len(inner) == 1 and _has_byte_level(inner[0])
    return decoder.get("type") == "ByteLevel"


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
