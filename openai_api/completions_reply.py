"""Chunks of a completion: of each choice the echoed prompt, then text, then the finish reason."""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

import msgspec
from msgspec import UNSET

from openai_api.answer import Stamp, UsageWishes
from openai_api.logprobs import LegacyLogprobs, prompt_logprobs
from openai_api.replies import Completion, CompletionChoice, CompletionLogprobs
from openai_api.run import Run
from service.text.choice import Delta
from service.text.generation import TextGenerator


class Prompt(msgspec.Struct, frozen=True):
    """One prompt of a request."""

    ids: list[int]
    text: str = ""  # known where it is echoed
    num_hidden: int = 0  # leading ids that are no part of the text: a BOS that the tokenizer added


class Wishes(msgspec.Struct, frozen=True):
    """What a reply holds besides text."""

    usage: UsageWishes
    num_kept: int  # choices of each prompt; where more were generated, the likeliest
    echo: bool
    logprobs: bool
    prompt_logprobs: bool
    token_ids: bool


class CompletionReply:
    """Implements answer.Reply."""

    def __init__(
        self, generator: TextGenerator, run: Run, stamp: Stamp, prompts: Sequence[Prompt], wishes: Wishes
    ) -> None:
        self._generator = generator
        self._run = run
        self._stamp = stamp
        self._prompts = prompts
        self._wishes = wishes
        self._legacy = LegacyLogprobs(generator)
        self._started: set[int] = set()  # choices

    async def chunks(self) -> AsyncGenerator[list[Completion], None]:
        async with aclosing(self._run.deltas()) as deltas:
            async for delta in deltas:
                choices = self._choices(delta)
                if choices:
                    yield [self._chunk([choice]) for choice in choices]
        if self._wishes.usage.at_end:
            last = self._chunk([])
            last.usage = self._run.usage()
            yield [last]

    def _choices(self, delta: Delta) -> list[CompletionChoice]:
        """What a delta adds to its choice."""
        choices, wishes = list[CompletionChoice](), self._wishes
        if delta.index not in self._started:
            self._started.add(delta.index)
            if wishes.echo or wishes.prompt_logprobs or wishes.token_ids:
                choices.append(self._beginning(delta))
        logprobs = self._legacy.of(delta)
        if delta.text or logprobs is not None or (wishes.token_ids and delta.token_ids):
            token_ids = delta.token_ids if wishes.token_ids else UNSET
            choices.append(CompletionChoice(delta.index, delta.text, logprobs, token_ids=token_ids))
        if delta.finish_reason is not None:
            choices.append(CompletionChoice(delta.index, "", None, delta.finish_reason))
        return choices

    def _beginning(self, delta: Delta) -> CompletionChoice:
        """What a choice has of its prompt; its logprobs came with the first delta."""
        wishes, prompt = self._wishes, self._prompts[delta.index // self._run.n]
        choice = CompletionChoice(delta.index, prompt.text if wishes.echo else "")
        if wishes.echo and wishes.logprobs:
            choice.logprobs = self._legacy.of_prompt(
                delta.index, prompt.ids, prompt.num_hidden, delta.prompt_logprobs
            )
        if wishes.prompt_logprobs:
            choice.prompt_logprobs = prompt_logprobs(
                self._generator, len(prompt.ids), delta.prompt_logprobs
            )
        if wishes.token_ids:
            choice.prompt_token_ids = prompt.ids
        return choice

    def _chunk(self, choices: list[CompletionChoice]) -> Completion:
        stamp, usage = self._stamp, self._wishes.usage
        sent = self._run.usage() if usage.always else None if usage.at_end else UNSET
        return Completion(stamp.id, stamp.created, stamp.model, stamp.system_fingerprint, choices, sent)

    async def joined(self) -> Completion:
        choices = [_Fold(index, self._wishes) for index in range(self._run.num_choices)]
        async with aclosing(self.chunks()) as batches:
            async for batch in batches:
                for chunk in batch:
                    for piece in chunk.choices:
                        choices[piece.index].add(piece)
        whole = self._chunk([fold.choice() for fold in self._kept(choices)])
        for index, choice in enumerate(whole.choices):
            choice.index = index
        whole.usage = self._run.usage()
        return whole

    def _kept(self, choices: "list[_Fold]") -> "list[_Fold]":
        """Of each prompt the likeliest, best first, where more were generated than are wanted."""
        n, wanted = self._run.n, self._wishes.num_kept
        if n == wanted:
            return choices
        groups = [choices[start : start + n] for start in range(0, len(choices), n)]
        return [fold for group in groups for fold in sorted(group, key=_Fold.badness)[:wanted]]


class _Fold:
    """One choice of a plain reply, out of its chunks."""

    def __init__(self, index: int, wishes: Wishes) -> None:
        self._choice = CompletionChoice(index, "")
        self._texts: list[str] = []
        self._wishes = wishes

    def add(self, piece: CompletionChoice) -> None:
        choice = self._choice
        self._texts.append(piece.text)
        choice.finish_reason = piece.finish_reason or choice.finish_reason
        if piece.prompt_logprobs is not UNSET:
            choice.prompt_logprobs = piece.prompt_logprobs
        if piece.prompt_token_ids is not UNSET:
            choice.prompt_token_ids, choice.token_ids = piece.prompt_token_ids, []
        if piece.token_ids is not UNSET and choice.token_ids is not UNSET:
            choice.token_ids += piece.token_ids
        if piece.logprobs is not None:
            if choice.logprobs is None:
                choice.logprobs = CompletionLogprobs([], [], [], [])
            for name in CompletionLogprobs.__struct_fields__:
                getattr(choice.logprobs, name).extend(getattr(piece.logprobs, name))

    def choice(self) -> CompletionChoice:
        self._choice.text = "".join(self._texts)
        if not self._wishes.logprobs:
            self._choice.logprobs = None  # only best_of has looked at them
        return self._choice

    def badness(self) -> float:
        """Minus the mean logprob of a token, the prompt's not counted as they are alike."""
        lists = self._choice.logprobs
        found = [] if lists is None else [each for each in lists.token_logprobs if each is not None]
        return -sum(found) / max(1, len(found))
