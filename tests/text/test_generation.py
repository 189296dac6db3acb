"""From ids of an engine to deltas: text, logprobs, ends, and what is refused."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.engine.request import FinishReason, Output
from service.errors import (
    ContextLengthError,
    EngineDeadError,
    GenerationError,
    OverloadedError,
    RequestError,
)
from service.model.config import SamplingDefaults
from service.text.chat_template import ChatTemplate
from service.text.choice import Delta
from service.text.generation import Generation, GenerationParams, TextGenerator
from service.text.tokenizer import LONG_TEXT, Tokenizer
from tests.text.samples import CHATML, LLAMA3_TOKENS, byte_level_json, make_tokenizer, spec_of
from tests.text.scripted import ScriptedEngine, Submission, logprobs_of

TOKENIZER = make_tokenizer("chatml")
(EOS,) = TOKENIZER.encode("<|im_end|>")
(START,) = TOKENIZER.encode("<|im_start|>")
EMOJI = "\U0001fae0"


def make_generator(engine: ScriptedEngine, **defaults: Any) -> TextGenerator:
    return TextGenerator(engine, TOKENIZER, ChatTemplate(CHATML, TOKENIZER), SamplingDefaults(**defaults))


def make_engine(*scripts: Sequence[Any], **options: Any) -> ScriptedEngine:
    return ScriptedEngine(
        *scripts, **{"eos_token_ids": [EOS], "vocab_size": TOKENIZER.vocab_size, **options}
    )


def letters(text: str) -> list[int]:
    """An id for each byte, so that every character is a token or several."""
    ids_of = {TOKENIZER.token_bytes(token_id): token_id for token_id in range(256)}
    return [ids_of[bytes([byte])] for byte in text.encode()]


async def started(engine: ScriptedEngine, **params: Any) -> Generation:
    return await make_generator(engine).start([1, 2, 3], GenerationParams(**params), request_id="r")


async def deltas_of(engine: ScriptedEngine, **params: Any) -> list[Delta]:
    return [delta async for delta in await started(engine, **params)]


def text_of(deltas: Sequence[Delta], index: int = 0) -> str:
    return "".join(delta.text for delta in deltas if delta.index == index)


def check_form(deltas: Sequence[Delta], n: int = 1) -> None:
    """Each choice ends once, with its last delta."""
    for index in range(n):
        own = [delta for delta in deltas if delta.index == index]
        assert [delta.finish_reason is not None for delta in own] == [False] * (len(own) - 1) + [True]


async def test_text_comes_as_it_is_made_and_ends_without_the_eos_text() -> None:
    engine = make_engine([*letters("Hi"), letters(" you"), EOS, *letters("never")])

    deltas = await deltas_of(engine)

    check_form(deltas)
    assert [delta.text for delta in deltas] == ["H", "i", " you", ""]
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", None)
    assert sum(len(delta.token_ids) for delta in deltas) == 7  # the EOS was generated, too


async def test_a_split_character_is_never_shown_in_parts_beside_seven_other_requests() -> None:
    texts = [f"{EMOJI * i} né日{EMOJI}" for i in range(8)]
    engine = make_engine(*([*letters(text), EOS] for text in texts))
    generator = make_generator(engine)

    async def reply(i: int) -> list[Delta]:
        generation = await generator.start([1], GenerationParams(), request_id=f"r{i}")
        return [delta async for delta in generation]

    replies = await asyncio.gather(*(reply(i) for i in range(8)))

    assert [text_of(deltas) for deltas in replies] == texts
    assert not any("\ufffd" in delta.text for deltas in replies for delta in deltas)


async def test_a_character_that_stays_incomplete_is_replaced_at_the_end() -> None:
    deltas = await deltas_of(make_engine(letters(f"a{EMOJI}")[:-1]))

    assert [delta.text for delta in deltas if delta.text] == ["a", "\ufffd"]
    assert deltas[-1].finish_reason == "length"


WORDS = "The quick brown fox jumps over the lazy dog, and the dog says: what is the capital of France?"
STORY = f"One day, the {EMOJI} said: né! né!\n\nThe end of the day.\n"


@given(
    begin=st.integers(0, len(STORY) - 2),
    length=st.integers(1, 12),
    sizes=st.lists(st.integers(1, 7), max_size=8),
    includes=st.booleans(),
)
@settings(deadline=None)
async def test_a_stop_string_ends_the_text_wherever_tokens_and_steps_end(
    begin: int, length: int, sizes: list[int], includes: bool
) -> None:
    stop = STORY[begin : begin + length]
    ids = letters(STORY)
    script: list[list[int]] = []
    for size in sizes:
        script, ids = [*script, ids[:size]], ids[size:]
    engine = make_engine([group for group in [*script, ids] if group])

    deltas = await deltas_of(engine, stop=(stop,), include_stop_str_in_output=includes, logprobs=0)

    check_form(deltas)
    expected = STORY[: STORY.find(stop)] + (stop if includes else "")
    assert text_of(deltas) == expected
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    entries = [entry.token_id for delta in deltas for entry in delta.logprobs]
    assert b"".join(map(TOKENIZER.token_bytes, entries)) == expected.encode()
    num_ids = sum(len(delta.token_ids) for delta in deltas)
    assert num_ids == len(STORY[: STORY.find(stop) + len(stop)].encode())


@given(begin=st.integers(0, len(WORDS) - 2), length=st.integers(1, 12))
@settings(deadline=None)
async def test_a_stop_string_may_begin_and_end_within_tokens(begin: int, length: int) -> None:
    stop = WORDS[begin : begin + length]
    ids = TOKENIZER.encode(WORDS)
    assert len(ids) < len(WORDS) / 2

    deltas = await deltas_of(make_engine(ids), stop=(stop,), logprobs=0)

    expected = WORDS[: WORDS.find(stop)]
    assert text_of(deltas) == expected
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", stop)
    entries = [entry.token_id for delta in deltas for entry in delta.logprobs]
    ends = [len(TOKENIZER.decode(ids[:count])) for count in range(len(ids) + 1)]
    assert entries == ids[: sum(end < len(expected) for end in ends)]


async def test_text_that_may_begin_a_stop_string_is_held_back_with_its_logprobs() -> None:
    more = asyncio.Event()
    engine = make_engine([letters("ab\n"), more, letters("c\n\nd")])
    generation = await started(engine, stop=("\n\n",), logprobs=0)
    deltas = aiter(generation)

    first = await anext(deltas)
    more.set()
    rest = [delta async for delta in deltas]

    assert (first.text, [entry.token_id for entry in first.logprobs]) == ("ab", letters("ab"))
    assert text_of(rest) == "\nc"
    assert [entry.token_id for delta in rest for entry in delta.logprobs] == letters("\nc")


async def test_a_stop_string_cancels_the_request_without_counting_as_an_abort() -> None:
    engine = make_engine([*letters("a.b"), asyncio.Event()])

    await deltas_of(engine, stop=(".",))

    assert engine.submissions[0].closed_as == ["stop_string"]


async def test_what_was_held_back_for_a_stop_string_comes_at_the_end() -> None:
    deltas = await deltas_of(make_engine([*letters("a\n"), EOS]), stop=("\n\n",), logprobs=0)

    assert text_of(deltas) == "a\n"
    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == letters("a\n")


@pytest.mark.parametrize(("min_tokens", "expected"), [(0, "a"), (2, "a"), (3, "a."), (4, "a..")])
async def test_no_stop_string_ends_a_reply_before_its_least_number_of_tokens(
    min_tokens: int, expected: str
) -> None:
    deltas = await deltas_of(make_engine([*letters("a....d")]), stop=(".",), min_tokens=min_tokens)

    assert text_of(deltas) == expected
    assert sum(len(delta.token_ids) for delta in deltas) == max(min_tokens, 2)


async def test_logprobs_of_tokens_without_text_come_at_the_end_at_the_latest() -> None:
    deltas = await deltas_of(make_engine([*letters("a"), START]), logprobs=0)

    assert [entry.token_id for delta in deltas for entry in delta.logprobs] == [*letters("a"), START]


@pytest.mark.parametrize("skips", [True, False])
async def test_special_tokens_are_shown_on_demand_but_never_the_ending_one(skips: bool) -> None:
    script = [*letters("ab"), START, *letters("c"), EOS]

    deltas = await deltas_of(make_engine(script), skip_special_tokens=skips)

    assert text_of(deltas) == ("abc" if skips else "ab<|im_start|>c")


@pytest.mark.parametrize("skips", [True, False])
@pytest.mark.parametrize("ending", [letters("b")[0], START])
async def test_a_stop_token_ends_the_text_before_it(ending: int, skips: bool) -> None:
    script = [*letters("xy"), ending, *letters("z")]

    deltas = await deltas_of(make_engine(script), stop_token_ids=(ending,), skip_special_tokens=skips)

    assert text_of(deltas) == "xy"
    assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", ending)


async def test_eos_is_an_ordinary_special_token_when_it_is_ignored() -> None:
    script = [*letters("a"), EOS, *letters("b")]

    assert text_of(await deltas_of(make_engine(script), ignore_eos=True)) == "ab"
    shown = await deltas_of(make_engine(script), ignore_eos=True, skip_special_tokens=False)
    assert text_of(shown) == "a<|im_end|>b"


async def test_the_text_of_a_control_token_works_as_a_stop_string() -> None:
    script = [*letters("a"), START, *letters("b")]

    skipped = await deltas_of(make_engine(script), stop=("<|im_start|>",))
    shown = await deltas_of(make_engine(script), stop=("<|im_start|>",), skip_special_tokens=False)

    for deltas in (skipped, shown):
        assert text_of(deltas) == "a"
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", "<|im_start|>")


async def test_logprobs_stand_beside_the_text_of_their_tokens() -> None:
    engine = make_engine([letters("a") + letters(EMOJI)[:2], letters(EMOJI)[2:], EOS])

    deltas = await deltas_of(engine, logprobs=2)

    assert [(delta.text, [e.token_id for e in delta.logprobs]) for delta in deltas] == [
        ("a", letters("a")),
        (EMOJI, letters(EMOJI)),
        ("", []),
    ]
    assert deltas[0].logprobs == [logprobs_of(letters("a")[0], 2)]


async def test_every_choice_ends_for_itself_and_all_are_told_apart() -> None:
    late = asyncio.Event()
    engine = make_engine(
        [*letters("a"), EOS], [*letters("b."), late, *letters("c"), EOS], [*letters("d.e"), asyncio.Event()]
    )
    generation = await started(engine, n=3, stop=(".e",), max_tokens=5)
    deltas: list[Delta] = []

    async for delta in generation:
        deltas.append(delta)
        if sum(each.finish_reason is not None for each in deltas) == 2:
            late.set()

    check_form(deltas, n=3)
    assert [text_of(deltas, index) for index in range(3)] == ["a", "b.c", "d"]
    assert generation.num_prompt_tokens == 3
    assert [submission.params.choice for submission in engine.submissions] == [0, 1, 2]
    assert {submission.params.seed for submission in engine.submissions} == {None}
    assert len({submission.request_id for submission in engine.submissions}) == 3


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize(
    ("failure", "kind"),
    [
        (Output(finish_reason=FinishReason.ERROR, error="NaN in the logits"), GenerationError),
        (EngineDeadError("NaN in the logits"), EngineDeadError),
    ],
)
async def test_a_failing_choice_ends_the_request_and_cancels_its_siblings(
    n: int, failure: Any, kind: type[Exception]
) -> None:
    def script_of(submission: Submission) -> list[Any]:
        is_last = submission.params.choice == n - 1
        return [*letters("ab"), failure if is_last else asyncio.Event()]

    engine = make_engine(script_of=script_of)
    generation = await started(engine, n=n)
    deltas: list[Delta] = []

    async def listen() -> None:
        async for delta in generation:
            deltas.append(delta)

    with pytest.raises(kind, match="NaN"):
        await listen()

    assert text_of(deltas, n - 1) == "ab"
    assert [submission.closed_as for submission in engine.submissions] == [["error"]] * (n - 1) + [[]]


@pytest.mark.parametrize("n", [1, 3])
async def test_closing_cancels_every_choice_and_ends_the_iteration(n: int) -> None:
    engine = make_engine([*letters("ab"), asyncio.Event()])
    generation = await started(engine, n=n)
    said = asyncio.Event()

    async def listen() -> list[Delta]:
        deltas = []
        async for delta in generation:
            deltas.append(delta)
            if all(text_of(deltas, index) == "ab" for index in range(n)):
                said.set()
        return deltas

    listening = asyncio.create_task(listen())
    await said.wait()
    await generation.aclose()
    await generation.aclose("error")
    deltas = await listening

    assert [submission.closed_as for submission in engine.submissions] == [["client_gone"]] * n
    assert all(delta.finish_reason is None for delta in deltas)


@pytest.mark.parametrize("n", [1, 3])
async def test_a_listener_that_is_cancelled_leaves_nothing_running(n: int) -> None:
    engine = make_engine([*letters("a"), asyncio.Event()])
    generation = await started(engine, n=n)
    said = asyncio.Event()

    async def listen() -> None:
        async for _ in generation:
            said.set()

    listening = asyncio.create_task(listen())
    await said.wait()
    listening.cancel()
    await asyncio.gather(listening, return_exceptions=True)
    await generation.aclose()
    await asyncio.sleep(0)
    await asyncio.sleep(0)

    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_a_refusal_half_way_takes_back_what_was_submitted() -> None:
    engine = make_engine([1], refusals={2: OverloadedError("full", retry_after_seconds=1)})

    with pytest.raises(OverloadedError):
        await started(engine, n=4)

    assert [submission.closed_as for submission in engine.submissions] == [["error"], ["error"]]


async def test_sampling_is_asked_for_then_recommended_then_openais() -> None:
    engine = make_engine([1])
    generator = make_generator(engine, temperature=0.6, top_k=20, min_p=None)

    await generator.start([1], GenerationParams(temperature=0.0, top_p=0.5), request_id="a")
    await generator.start([1], GenerationParams(), request_id="b")
    await make_generator(engine).start([1], GenerationParams(), request_id="c")

    seen = [
        (s.params.temperature, s.params.top_p, s.params.top_k, s.params.min_p) for s in engine.submissions
    ]
    assert seen == [(0.0, 0.5, 20, 0.0), (0.6, 1.0, 20, 0.0), (1.0, 1.0, 0, 0.0)]


async def test_other_parameters_reach_the_engine() -> None:
    engine = make_engine([1])
    given: dict[str, Any] = {
        "seed": 7,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "repetition_penalty": 1.1,
        "logit_bias": ((5, -100.0),),
        "min_tokens": 2,
        "stop_token_ids": (9,),
        "ignore_eos": True,
        "logprobs": 3,
        "max_tokens": 12,
    }

    await started(engine, priority=4, **given)

    (submission,) = engine.submissions
    assert {name: getattr(submission.params, name) for name in given} == given
    assert submission.priority == 4


@pytest.mark.parametrize(
    ("asked", "granted", "is_clamped"), [(None, 13, False), (5, 5, False), (13, 13, False), (50, 13, True)]
)
async def test_a_prompt_that_fits_is_served_up_to_the_context(
    asked: int | None, granted: int, is_clamped: bool
) -> None:
    engine = make_engine([letters("x" * 40)], max_model_len=16)

    generation = await started(engine, max_tokens=asked)
    deltas = [delta async for delta in generation]

    assert (generation.max_tokens, generation.is_clamped) == (granted, is_clamped)
    assert text_of(deltas) == "x" * granted
    assert deltas[-1].finish_reason == "length"


@pytest.mark.parametrize("num_prompt_tokens", [16, 17, 216])
@pytest.mark.parametrize("max_tokens", [None, 50])
async def test_a_prompt_that_leaves_no_room_is_refused_with_both_numbers(
    num_prompt_tokens: int, max_tokens: int | None
) -> None:
    engine = make_engine([1], max_model_len=16)

    with pytest.raises(ContextLengthError, match=f"16 tokens.*{num_prompt_tokens} tokens") as refusal:
        await make_generator(engine).start(
            [1] * num_prompt_tokens, GenerationParams(max_tokens=max_tokens), request_id="r"
        )

    assert refusal.value.code == "context_length_exceeded"
    assert engine.submissions == []


@pytest.mark.parametrize(
    ("prompt", "params", "field"),
    [
        ([TOKENIZER.vocab_size], {}, "prompt"),
        ([-1], {}, "prompt"),
        ([], {}, "prompt"),
        ([1], {"logit_bias": ((TOKENIZER.vocab_size, 1.0),)}, "logit_bias"),
        ([1], {"stop_token_ids": (2**31,)}, "stop_token_ids"),
        ([1], {"max_tokens": -1}, "max_tokens"),
    ],
)
async def test_what_the_model_does_not_have_is_refused_by_name(
    prompt: list[int], params: dict[str, Any], field: str
) -> None:
    engine = make_engine([1])

    with pytest.raises(RequestError) as refusal:
        await make_generator(engine).start(prompt, GenerationParams(**params), request_id="r")

    assert refusal.value.field == field
    assert engine.submissions == []


async def test_a_model_without_a_template_says_what_to_do() -> None:
    generator = TextGenerator(make_engine(), TOKENIZER, None, SamplingDefaults())

    with pytest.raises(RequestError, match="/v1/completions") as refusal:
        await generator.render_chat([{"role": "user", "content": "Hi"}])

    assert refusal.value.field == "messages"


@pytest.mark.parametrize("num_repeats", [1, 3000])  # on the event loop, and in a thread
async def test_short_and_long_texts_give_their_ids(num_repeats: int) -> None:
    generator = make_generator(make_engine())
    content = "Hello\0 world \ud83c" * num_repeats
    seen = content.replace("\ud83c", "\ufffd")

    raw = await generator.encode(content)
    text, ids = await generator.render_chat([{"role": "user", "content": content}])

    assert TOKENIZER.decode(raw) == seen
    assert text == f"<|im_start|>user\n{seen}<|im_end|>\n<|im_start|>assistant\n"
    assert TOKENIZER.decode(ids, skip_special_tokens=False) == text


def test_a_token_is_shown_as_text_and_as_bytes() -> None:
    generator = make_generator(make_engine())
    lead = letters(EMOJI)[0]

    assert generator.token_text(letters("a")[0]) == ("a", b"a")
    assert generator.token_text(lead) == ("\ufffd", b"\xf0")
    assert generator.token_text(EOS) == ("<|im_end|>", b"<|im_end|>")


async def test_cached_tokens_of_the_prompt_are_passed_on() -> None:
    engine = make_engine([Output(token_ids=letters("a"), num_cached_tokens=2), EOS])

    deltas = await deltas_of(engine)

    assert deltas[0].num_cached_tokens == 2


@pytest.mark.parametrize("length", [3, LONG_TEXT])
async def test_a_prompt_has_bos_only_if_it_is_wanted_and_ids_become_text_with_it(length: int) -> None:
    bos = LLAMA3_TOKENS[0]
    tokenizer = Tokenizer(spec_of(byte_level_json(LLAMA3_TOKENS, True), bos))
    engine = ScriptedEngine(eos_token_ids=[0], vocab_size=tokenizer.vocab_size)
    generator = TextGenerator(engine, tokenizer, None, SamplingDefaults())
    text = "a" * length

    with_bos = await generator.encode(text)
    without = await generator.encode(text, add_special_tokens=False)

    assert with_bos[1:] == without
    assert await generator.decode(with_bos, "tokens") == bos + text
    assert await generator.decode(without, "tokens") == text
    assert (await generator.token_names(with_bos))[0] == bos


async def test_ids_outside_the_vocabulary_have_no_text() -> None:
    generator = make_generator(make_engine())

    with pytest.raises(RequestError, match=r"tokens: the token id .* does not exist"):
        await generator.decode([TOKENIZER.vocab_size], "tokens")
