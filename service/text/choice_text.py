"""Text of one choice as it may be shown: whole characters, no stop string, with logprobs beside it."""

from collections.abc import Sequence

from service.engine.request import TokenLogprobs
from service.text.detokenizer import Detokenizer
from service.text.stop_strings import StopStrings
from service.text.tokenizer import Tokenizer


class ChoiceText:
    """Ids in, text out. Text held back (see detokenizer.py, stop_strings.py) holds its logprobs back.

    Stop strings count from the text of the token number `min_tokens` on.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        stops: Sequence[str] = (),
        include_stop: bool = False,
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._detokenizer = Detokenizer(tokenizer, skip_special_tokens=skip_special_tokens)
        self._stops = StopStrings(stops, include_stop=include_stop)
        self._num_forced = min_tokens  # ids to come that no stop string may follow
        self._num_decoded = 0  # characters out of the detokenizer
        self._num_shown = 0  # characters let through
        self._held: list[tuple[int, TokenLogprobs]] = []  # (where the token's text begins, ...)

    @property
    def matched(self) -> str | None:
        """The stop string that has ended the text."""
        return self._stops.matched

    def push(self, token_id: int, logprobs: TokenLogprobs | None = None) -> str:
        """Text that can be shown with one more id."""
        if logprobs is not None:
            self._held.append((self._num_decoded, logprobs))
        text = self._detokenizer.push(token_id)
        self._num_decoded += len(text)
        self._num_forced -= 1
        return self._shown(text if self._num_forced > 0 else self._stops.feed(text))

    def flush(self) -> str:
        """What is held back, when no more ids come."""
        text = self._detokenizer.flush()
        self._num_decoded += len(text)
        shown = self._stops.feed(text)
        return self._shown(shown if self.matched is not None else shown + self._stops.flush())

    def take_logprobs(self, *, is_last: bool) -> list[TokenLogprobs]:
        """Of tokens whose text begins in what is shown by now; at the end those without text, too."""
        edge = self._num_shown
        if is_last and self.matched is None:
            edge = self._num_decoded + 1  # nothing is held back any more
        taken = [logprobs for begin, logprobs in self._held if begin < edge]
        self._held = [held for held in self._held if held[0] >= edge]
        return taken

    def _shown(self, text: str) -> str:
        self._num_shown += len(text)
        return text
