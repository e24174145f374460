"""Text in and out: the template, limits, and streams that never show half a character."""

from __future__ import annotations

import random
import string
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from confu_core import prompt as prompt_module
from confu_core.errors import PromptError
from confu_core.prompt import TextStream, chat_ids, token_label
from confu_core.target import Target
from tests import fakes

TEXTS = {
    "plain": "the user and the hen",
    "accents": "café naïve Ångström",
    "emoji": "a 😀🎉 b 👩‍👩‍👧 c 🇫🇷",
    "chinese": "天空为什么是蓝色的？",
    "mixed scripts": "Почему небо голубое? हिन्दी ไทย العربية",
    "combining marks": "e\u0301 a\u0308\u0323 n\u0303",
    "newlines and tabs": "one\n\n\ttwo \r\n three",
    "a real replacement character": "a \ufffd b",
    "spaces": "   leading and   trailing   ",
}


@pytest.fixture(scope="module")
def target() -> Target:
    return fakes.tiny_target()


def full(target: Target, ids: list[int]) -> str:
    return target.tokenizer.decode(
        ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
    )


def stream(target: Target, ids: list[int], sizes: list[int]) -> list[str]:
    """Push ids in groups of the given sizes; the deltas, with the flush last."""
    out, start = TextStream(target), 0
    deltas = []
    for size in sizes:
        deltas.append(out.push(ids[start : start + size]))
        start += size
        assert out.text == "".join(deltas), "what was shown is never taken back"
    deltas += [out.push(ids[start:]), out.flush()]
    assert out.text == "".join(deltas)
    return deltas


@pytest.mark.parametrize("name", TEXTS)
@pytest.mark.parametrize("how", ["merged", "bytes"])
def test_joined_deltas_equal_the_full_text(target, name, how):
    text = TEXTS[name]
    encode = target.tokenizer.encode
    ids = encode(text) if how == "merged" else fakes.byte_ids(target, text.encode())
    for sizes in ([1] * len(ids), [2] * (len(ids) // 2), [], [5, 1, 1]):
        deltas = stream(target, ids, sizes)
        assert "".join(deltas) == text == full(target, ids)
        if "\ufffd" not in text:
            assert not any("\ufffd" in delta for delta in deltas), "half a character was shown"


def test_characters_appear_as_soon_as_they_are_whole(target):
    ids = fakes.byte_ids(target, "a😀é!".encode())
    deltas = stream(target, ids, [1] * len(ids))
    assert deltas[:-2] == ["a", "", "", "", "😀", "", "é", "!"]


BYTES = st.lists(
    st.sampled_from([0x41, 0x20, 0x80, 0x9F, 0xA9, 0xC3, 0xE2, 0x82, 0xAC, 0xF0, 0xFF, 0xED]),
    max_size=40,
)


@given(BYTES, st.lists(st.integers(1, 6), max_size=8))
@settings(max_examples=300, deadline=None)
def test_invalid_bytes(target, raw, sizes):
    """Any bytes at all: the stream ends up as the full decoding."""
    ids = fakes.byte_ids(target, bytes(raw))
    assert "".join(stream(target, ids, sizes)) == full(target, ids)
    assert full(target, ids) == bytes(raw).decode(errors="replace")


@pytest.mark.parametrize("before", range(12))
def test_a_character_behind_undecodable_bytes(target, before):
    """However many bytes were given up on, the character that follows them is whole."""
    raw = b"\xff" * before + "€😀".encode() + b"\xe2\x82"
    ids = fakes.byte_ids(target, raw)
    assert "".join(stream(target, ids, [1] * len(ids))) == "\ufffd" * before + "€😀\ufffd"


@given(st.lists(st.integers(0, 293), max_size=60))
@settings(max_examples=200, deadline=None)
def test_any_tokens(target, ids):
    """Special tokens, merged halves of characters, everything that a random target may write."""
    assert "".join(stream(target, ids, [1] * len(ids))) == full(target, ids)


@given(st.text(max_size=40))
@settings(max_examples=200, deadline=None)
def test_any_text(target, text):
    for ids in (target.tokenizer.encode(text), fakes.byte_ids(target, text.encode())):
        assert "".join(stream(target, ids, [1] * len(ids))) == text


def test_held_back_text_is_bounded(target):
    """A long run of undecodable bytes is shown in time, not at the end of the run."""
    ids = fakes.byte_ids(target, b"\xff" * 40)
    out = TextStream(target)
    longest = 0
    for count, token in enumerate(ids, 1):
        out.push([token])
        longest = max(longest, count - len(out.text))
    assert longest <= prompt_module.MAX_HELD
    out.flush()
    assert out.text == "\ufffd" * 40


@pytest.mark.parametrize("data", [b"\xff", b"the user ", "😀".encode()])
def test_streaming_takes_linear_time(target, data):
    """The tokens decoded in all grow with the text, not with its square."""
    work = []
    decode = target.tokenizer.decode

    class Counting:
        def decode(self, ids, **options):
            work.append(len(ids))
            return decode(ids, **options)

    class Fake:
        tokenizer = Counting()

    totals = []
    for repeats in (50, 200):
        work.clear()
        out = TextStream(Fake())
        ids = fakes.byte_ids(target, data * repeats)
        for token in ids:
            out.push([token])
        out.flush()
        totals.append(sum(work) / len(ids))
    assert totals[1] < 1.3 * totals[0]


def test_a_long_answer_streams_in_no_time(target):
    dice = random.Random(0)
    ids = [dice.randrange(3, 290) for _ in range(3000)]
    out = TextStream(target)
    start = time.perf_counter()
    for token in ids:
        out.push([token])
    assert time.perf_counter() - start < 6.0


def test_special_tokens_are_not_shown(target):
    ids = [*fakes.byte_ids(target, b"ab"), fakes.TURN_END, *fakes.byte_ids(target, b"c")]
    assert "".join(stream(target, ids, [1] * 4)) == "abc"


# Labels ------------------------------------------------------------------------------------------


def test_labels_of_whole_and_broken_characters(target):
    def label(data: bytes) -> str:
        (token,) = fakes.byte_ids(target, data)
        return token_label(target, token)

    assert label(b"a") == "a"
    assert label(b" ") == " "
    assert label(b"\n") == "\n"
    assert label(b"\xe2") == "<0xE2>"
    assert label(b"\x80") == "<0x80>"
    assert label(b"\xff") == "<0xFF>"
    vocabulary = target.tokenizer.get_vocab()
    assert token_label(target, vocabulary["Ġthe"]) == " the"
    assert token_label(target, vocabulary["Ã©"]) == "é"
    assert token_label(target, vocabulary["ðŁ"]) == "<0xF0><0x9F>"
    assert token_label(target, fakes.TURN_END) == "<|im_end|>"


def test_every_byte_has_a_label_that_names_it(target):
    for byte in range(256):
        (token,) = fakes.byte_ids(target, bytes([byte]))
        wanted = chr(byte) if byte < 128 else f"<0x{byte:02X}>"
        assert token_label(target, token) == wanted


def test_every_token_has_a_label(target):
    labels = [token_label(target, token) for token in range(target.vocab)]
    assert all(labels)
    assert len(set(labels)) == target.vocab
    assert not any("\ufffd" in label for label in labels)


# Prompts -----------------------------------------------------------------------------------------


def test_chat_template(target):
    ids = chat_ids(target, "the hen")
    assert full(target, ids) == "user\nthe hen\nassistant\n"
    assert ids[0] == fakes.TURN_START
    assert ids.count(fakes.TURN_START) == 2
    assert ids.count(fakes.TURN_END) == 1
    assert all(type(token) is int for token in ids)


def test_several_messages_continue_the_first(target):
    first = chat_ids(target, "the hen")
    chat = [
        {"role": "user", "content": "the hen"},
        {"role": "assistant", "content": "is here"},
        {"role": "user", "content": "and then?"},
    ]
    later = chat_ids(target, chat)
    assert later[: len(first)] == first
    assert full(target, later).endswith("is here\nuser\nand then?\nassistant\n")


def test_special_tokens_in_a_prompt_do_not_crash(target):
    assert chat_ids(target, "a <|im_end|> b")


def test_without_a_template_the_text_is_taken_as_it_is():
    target = fakes.tiny_target()
    target.tokenizer.chat_template = None
    assert full(target, chat_ids(target, "the hen")) == "the hen"


@pytest.mark.parametrize("text", ["", " ", "\n\t ", []])
def test_empty_prompts(target, text):
    with pytest.raises(PromptError, match="empty"):
        chat_ids(target, text)


def test_empty_last_message(target):
    with pytest.raises(PromptError, match="empty"):
        chat_ids(target, [{"role": "user", "content": ""}])


def test_too_long_prompts_say_both_numbers(target):
    letters = string.ascii_uppercase * 20
    room = target.context - 1 - len(chat_ids(target, "A")) + 1
    assert len(chat_ids(target, letters[:room])) == target.context - 1
    with pytest.raises(PromptError) as caught:
        chat_ids(target, letters[: room + 1])
    assert f"{target.context} tokens" in str(caught.value)
    assert f"at most {target.context - 1}" in str(caught.value)


@pytest.mark.target
def test_real_tokenizer(default_target):
    ids = chat_ids(default_target, "Grüße 😀")
    assert ids.count(1) == 3, "system, user and assistant turn: no second BOS"
    assert ids[0] == 1
    for text in TEXTS.values():
        tokens = default_target.tokenizer.encode(text)
        assert "".join(stream(default_target, tokens, [1] * len(tokens))) == text
    labels = {token_label(default_target, token) for token in range(0, 49152, 7)}
    assert not any("\ufffd" in label for label in labels)
