"""Compiled grammars, and where a reply is in one. Implements service.engine.constraint.Constraint."""

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from functools import cached_property

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper
from numpy.typing import NDArray

from service.errors import OverloadedError, RequestError
from service.text.grammar import GrammarSpec, llguidance_grammar, refusal
from service.text.tokenizer import Tokenizer

COMPILE_SECONDS = 10.0
_MAX_CACHED = 64  # compiled grammars
_NUM_THREADS = 2
# llguidance descends by recursion, 3 to 16 KB for a $ref or a rule of a chain: of the longest texts that
# are taken some would overflow 8 MiB, which kills the process. Only what is touched takes memory.
_STACK_BYTES = 256 << 20
_LIMITS = LLParserLimits(verbose_errors=False)
_NO_WAY_ON = "Nothing that the tokens of this model can spell matches the grammar from here on."


class Grammars:
    """Compiles grammars for one tokenizer, in threads of its own, and keeps the last ones."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        vocab_size: int,
        eos_token_ids: Sequence[int],
        compile_seconds: float = COMPILE_SECONDS,
    ) -> None:
        """`vocab_size`: of the engine, whose ids above the tokenizer's are never allowed."""
        self._tokenizer = tokenizer
        self._vocab_size = min(vocab_size, tokenizer.vocab_size)
        self.eos_token_ids = [each for each in eos_token_ids if each < self._vocab_size]
        self._compile_seconds = compile_seconds
        self._compiled: OrderedDict[tuple[str, str], Matcher] = OrderedDict()
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Begin to read the vocabulary: up to a second and a half, and half of that with the GIL held."""
        self.pool.submit(self._read_vocabulary)

    async def compile(self, spec: GrammarSpec) -> "Matcher":
        """A matcher at the start of the grammar; a request takes copies of it.

        Raises: RequestError naming the field (not valid, not supported, too costly), OverloadedError.
        """
        key = (spec.kind, spec.text)
        if (found := self._compiled.get(key)) is not None:
            self._compiled.move_to_end(key)
            return found
        work = self.pool.submit(self._compile, spec)
        try:
            matcher = await asyncio.wait_for(asyncio.wrap_future(work), self._compile_seconds)
        except TimeoutError:
            if work.cancelled():  # it had not started: the grammars of others are to blame
                raise OverloadedError("Too many grammars to compile.", retry_after_seconds=5.0) from None
            raise refusal(
                spec, f"takes more than {self._compile_seconds:g} seconds to compile; make it simpler."
            ) from None
        self._compiled[key] = matcher
        if len(self._compiled) > _MAX_CACHED:
            self._compiled.popitem(last=False)
        return matcher

    @cached_property
    def pool(self) -> Executor:
        """Threads with room for deep recursion; made at first use."""
        pool = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")
        all_started = threading.Barrier(_NUM_THREADS)
        previous = threading.stack_size(_STACK_BYTES)
        try:
            list(pool.map(lambda _: all_started.wait(), range(_NUM_THREADS)))
        finally:
            threading.stack_size(previous)
        return pool

    def _compile(self, spec: GrammarSpec) -> "Matcher":
        try:
            return self._compile_whole(spec)
        except RequestError:
            for part in spec.parts:
                self._compile_whole(part)  # the one to blame raises
            raise

    def _compile_whole(self, spec: GrammarSpec) -> "Matcher":
        text = llguidance_grammar(spec)
        vocabulary, eos_bits = self._read_vocabulary()
        raw = LLMatcher(vocabulary, text, log_level=0, limits=_LIMITS)
        if raw.is_error():
            raise refusal(spec, raw.get_error())
        matcher = Matcher(raw, eos_bits)
        if matcher.failure is not None:
            raise refusal(spec, matcher.failure)
        if matcher.is_over:
            raise refusal(spec, "only the empty text matches.")
        return matcher

    def _read_vocabulary(self) -> tuple[LLTokenizer, NDArray[np.uint32]]:
        with self._lock:
            return self._vocabulary

    @cached_property
    def _vocabulary(self) -> tuple[LLTokenizer, NDArray[np.uint32]]:
        """The tokenizer as llguidance wants it, and the bits of EOS in a mask.

        A model without EOS gets one that it can't sample, so that the end of a grammar can be seen.
        """
        vocabulary = _Vocabulary(self._tokenizer, self._vocab_size, self.eos_token_ids)
        eos_bits = np.zeros(-(-len(vocabulary.tokens) // 32), np.uint32)
        for token_id in vocabulary.eos_token_ids:
            eos_bits[token_id // 32] |= np.uint32(1 << token_id % 32)
        return LLTokenizer(TokenizerWrapper(vocabulary), eos_token=vocabulary.eos_token_ids), eos_bits


class _Vocabulary:
    """What llguidance.TokenizerWrapper asks of a tokenizer."""

    bos_token_id = None

    def __init__(self, tokenizer: Tokenizer, vocab_size: int, eos_token_ids: list[int]) -> None:
        special = sorted(each for each in tokenizer.special_ids if each < vocab_size)
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self.tokens = [tokenizer.token_bytes(token_id) for token_id in range(vocab_size)]
        self.eos_token_ids = eos_token_ids or [vocab_size]
        if not eos_token_ids:
            self.tokens.append(b"<end>")
        self.eos_token_id = self.eos_token_ids[0]
        self.special_token_ids = sorted({*special, *self.eos_token_ids})
        for token_id in self.special_token_ids:
            self.tokens[token_id] = b"\xff" + self.tokens[token_id]  # by this mark llguidance knows them

    def __call__(self, text: bytes) -> list[int]:
        ids = self._tokenizer.encode(text.decode(errors="replace"), allow_special=False)
        return [each for each in ids if each < self._vocab_size]


class Matcher:
    """A place in a grammar, with the mask of the ids that may come next.

    The mask is computed as soon as the place is known: so the end of the grammar, and a grammar that grows
    too complex on the way, are seen without sampling another id.
    """

    def __init__(self, raw: LLMatcher, eos_bits: NDArray[np.uint32]) -> None:
        self._raw = raw
        self._eos_bits = eos_bits
        self._mask = np.zeros_like(eos_bits)
        self._is_over = False
        self._failure: str | None = None
        self._look()

    @property
    def is_over(self) -> bool:
        return self._is_over

    @property
    def failure(self) -> str | None:
        return self._failure

    def copy(self) -> "Matcher":
        """A matcher of its own at the same place."""
        twin = Matcher.__new__(Matcher)
        twin._raw = self._raw.deep_copy()
        twin._eos_bits = self._eos_bits
        twin._mask = self._mask.copy()
        twin._is_over, twin._failure = self._is_over, self._failure
        return twin

    def fill_mask(self, row: NDArray[np.uint32]) -> None:
        length = min(len(row), len(self._mask))
        row[:length] = self._mask[:length]
        row[length:] = 0

    def advance(self, token_id: int) -> None:
        self._raw.consume_token(token_id)
        self._look()

    def _look(self) -> None:
        self._raw.unsafe_compute_mask_ptr(self._mask.ctypes.data, self._mask.nbytes)
        may_end = bool((self._mask & self._eos_bits).any())
        if self._raw.is_error():
            reason = self._raw.get_error().partition("<backtrace>")[0].replace("<non-verbose/>", "")
            if "NoExtension" in reason:
                self._failure = _NO_WAY_ON
            else:
                self._failure = (
                    f"The grammar can't be followed any further: {' '.join(reason.split())[:200]}"
                )
        elif may_end:
            self._is_over = not (self._mask & ~self._eos_bits).any()
        elif not self._mask.any():
            self._failure = _NO_WAY_ON
