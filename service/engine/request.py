"""One request as the engine sees it: ids, sampling parameters, state. No text, no tensors."""

from dataclasses import dataclass, field
from enum import Enum

import msgspec

from service.engine.constraint import Constraint


class State(Enum):
    """Where a request is. PREEMPTED requests wait like WAITING ones, ahead of them."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED = "finished"


class FinishReason(Enum):
    """Why a request ended, as far as the engine can know. Stop strings end as CANCELLED from outside."""

    STOP = "stop"  # an EOS or stop token id
    LENGTH = "length"  # max_tokens, the context or the KV cache was reached
    CANCELLED = "cancelled"
    ERROR = "error"


class SamplingParams(msgspec.Struct, frozen=True, kw_only=True):
    """How the next token is chosen. Every value is final: defaults of model and API are already applied.

    Units: max_tokens, min_tokens in generated tokens. temperature 0 is greedy.
    """

    max_tokens: int
    temperature: float = 1.0
    top_k: int = 0  # 0: off
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int | None = None  # None: the engine draws one, so that a preempted request repeats itself
    choice: int = 0  # index among the n choices of one API request; part of the Philox key
    repetition_penalty: float = 1.0  # over prompt and generated ids
    presence_penalty: float = 0.0  # over generated ids
    frequency_penalty: float = 0.0  # over generated ids
    logit_bias: tuple[tuple[int, float], ...] = ()
    min_tokens: int = 0  # until then EOS and stop token ids are not sampled
    stop_token_ids: tuple[int, ...] = ()  # EOS ids of the model not included
    ignore_eos: bool = False
    logprobs: int | None = None  # None: none; k: of the chosen id and of the k most likely ones
    prompt_logprobs: int | None = None  # the same of the prompt's ids, but for the first
    constraint: Constraint | None = None  # of this request alone: it changes as the reply grows

    @property
    def has_penalties(self) -> bool:
        """Whether what was said before changes how likely an id is."""
        return (
            self.repetition_penalty != 1.0 or self.presence_penalty != 0.0 or self.frequency_penalty != 0.0
        )

    @property
    def needs_known_ids(self) -> bool:
        """Whether sampling looks at earlier ids, so that the host must know them first."""
        return self.has_penalties or self.constraint is not None


class TokenLogprobs(msgspec.Struct, frozen=True):
    """Natural-log probabilities at one position, of the model's own distribution (before penalties,
    bias, temperature and truncation)."""

    token_id: int
    logprob: float
    rank: int  # 1: the most likely id
    top_ids: tuple[int, ...] = ()  # most likely first; ties to the lowest id
    top_logprobs: tuple[float, ...] = ()


class Output(msgspec.Struct, kw_only=True):
    """What one request gains from a step: usually one id. The last has a finish reason."""

    token_ids: list[int] = []
    logprobs: list[TokenLogprobs] = []  # one an id when asked for, else empty
    prompt_logprobs: list[TokenLogprobs] = []  # of prompt ids from the second on; all by the first id
    finish_reason: FinishReason | None = None
    stop_token_id: int | None = None  # the EOS or stop id that ended it; it is the last of token_ids
    error: str | None = None  # with FinishReason.ERROR: a message for the user
    num_cached_tokens: int = 0  # prompt tokens taken from the prefix cache, known from the first output on


@dataclass(slots=True, eq=False)
class Request:
    """State of one request. Its owner is the engine loop; nothing else writes to it.

    Invariant: num_computed_tokens <= len(block_table) * block_size, and
    num_computed_tokens <= num_tokens (ids known or in flight).
    """

    id: str
    prompt_ids: list[int]
    params: SamplingParams
    priority: int = 0  # lower goes first, first come first served within one
    arrival: int = 0  # serial number of submission
    submitted_at: float = 0.0  # time.monotonic() seconds
    seed: int = 0  # params.seed, or one drawn at submission
    state: State = State.WAITING
    token_ids: list[int] = field(init=False)  # prompt ids, then generated ids known to the host
    num_computed_tokens: int = 0  # positions whose KV is in the cache or being written by a launched step
    num_in_flight: int = 0  # launched steps of this request whose result the host has not read
    num_pending_ids: int = 0  # ids sampled by those steps, still unknown to the host
    block_table: list[int] = field(default_factory=list)
    lane: int = -1  # its own place in the runner's per-request arrays while it is RUNNING
    ending_ids: frozenset[int] = frozenset()  # EOS and stop ids, as this request wants them
    salt: bytes = b""  # requests share cached blocks only with requests of the same salt
    chain: int | bytes = b""  # prefix cache entry of the last registered block; the salt before the first
    num_registered_blocks: int = 0  # leading blocks that the prefix cache has seen
    num_cached_tokens: int | None = None  # prompt tokens found there at first admission
    num_scored: int = 0  # leading positions whose rows have scored the id behind them, or are about to
    admitted_at: float | None = None  # time.monotonic() seconds, first admission
    num_prompt_tokens: int = field(init=False)
    last_num_tokens: int = field(init=False)  # of prompt and reply, if nothing ends the reply early
    needs_known_ids: bool = field(init=False)  # whether sampling looks at earlier ids

    def __post_init__(self) -> None:
        self.token_ids = list(self.prompt_ids)
        self.chain = self.salt
        self.num_prompt_tokens = len(self.prompt_ids)
        self.last_num_tokens = self.num_prompt_tokens + self.params.max_tokens
        self.needs_known_ids = self.params.needs_known_ids

    @property
    def lacks_scores(self) -> bool:
        """Whether prompt ids are to be scored that no step has been planned for."""
        return self.params.prompt_logprobs is not None and self.num_scored < self.num_prompt_tokens - 1

    def plan_scores(self, start: int, end: int) -> tuple[int, int]:
        """Which of the rows at positions start to end score the id behind them; each does so once."""
        if not self.lacks_scores:
            return 0, 0
        first, last = max(start, self.num_scored), min(end, self.num_prompt_tokens - 1)
        self.num_scored = max(self.num_scored, last)
        return (first, last) if first < last else (0, 0)

    @property
    def num_tokens(self) -> int:
        """Ids that exist: known ones and those a launched step is sampling."""
        return len(self.token_ids) + self.num_pending_ids

    @property
    def num_uncomputed_tokens(self) -> int:
        return self.num_tokens - self.num_computed_tokens

    @property
    def order(self) -> tuple[int, int]:
        """Who goes first: smaller values do."""
        return self.priority, self.arrival

    @property
    def is_fully_planned(self) -> bool:
        """No further id is wanted, though some may still be in flight."""
        return len(self.token_ids) + self.num_pending_ids >= self.last_num_tokens

    @property
    def num_output_tokens(self) -> int:
        """Generated ids, pending ones included."""
        return self.num_tokens - self.num_prompt_tokens
