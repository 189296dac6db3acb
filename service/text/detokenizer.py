"""Ids to text as they come, never half a character."""

import codecs

from service.text.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"
_MAX_HELD_IDS = 16  # a character has at most 4 bytes; what stays incomplete longer is no character


class Detokenizer:
    """State of one choice. The pieces it returns join to `tokenizer.decode` of all ids.

    With a byte-level tokenizer a token is a fixed run of bytes, and characters are complete when UTF-8 says
    so. With any other the text of a token depends on its neighbours: a short window of ids is decoded with
    and without the new one, and the difference is held back while it ends in half a character. There, bytes
    that are not UTF-8 may come out as more or fewer U+FFFD than all ids at once would give.
    """

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip_special = skip_special_tokens
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._window: list[int] = []  # ids; the first `_num_read` are already in the text
        self._num_read = 0

    def push(self, token_id: int) -> str:
        """Text that is certain with one more id; may be empty."""
        if self._skip_special and token_id in self._tokenizer.special_ids:
            return ""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(self._tokenizer.token_bytes(token_id))
        self._window.append(token_id)
        known, text = self._decode_window()
        num_held = len(self._window) - self._num_read
        if (text.endswith(_REPLACEMENT) and num_held < _MAX_HELD_IDS) or len(text) < len(known):
            return ""
        if len(text) > len(known):  # else the next id would be decoded without the text before it
            self._window = self._window[self._num_read :]
        self._num_read = len(self._window)
        return text[len(known) :]

    def flush(self) -> str:
        """What is held back, at the end: an incomplete character becomes U+FFFD."""
        if self._tokenizer.is_byte_level:
            return self._utf8.decode(b"", final=True)
        known, text = self._decode_window()
        self._num_read = len(self._window)
        return text[len(known) :]

    def _decode_window(self) -> tuple[str, str]:
        decode = self._tokenizer.decode
        known = decode(self._window[: self._num_read], skip_special_tokens=False)
        return known, decode(self._window, skip_special_tokens=False)
