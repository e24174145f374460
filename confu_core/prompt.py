"""Text to token ids and back: chat template, context limit, streams without broken letters."""

from __future__ import annotations

from confu_core.errors import PromptError
from confu_core.target import Target

REPLACEMENT = "\ufffd"  # what decoding shows for bytes that are not (yet) a character
MAX_HELD = 8  # of these at the end of the text; a longer run is no character and is shown
MAX_OPEN = 3  # of these a character that is not complete yet can stand for: its bytes but the last


def chat_ids(target: Target, prompt: str | list[dict[str, str]]) -> list[int]:
    """Token ids of a user message, or of a chat, ready for the answer.

    A tokenizer without a chat template gets the text as it is, a chat with blank lines between.

    Raises:
        PromptError: empty, or it fills the context so that no token could follow.
    """
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    if not messages or not messages[-1]["content"].strip():
        raise PromptError("The prompt is empty. Type something for the model to answer.")
    tokenizer = target.tokenizer
    if tokenizer.chat_template:
        # return_dict is spelled out: its default changed between versions of transformers
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    else:
        ids = tokenizer.encode("\n\n".join(message["content"] for message in messages))
    if len(ids) >= target.context:
        raise PromptError(
            f"The prompt has {len(ids)} tokens; this target reads at most {target.context - 1} "
            "and needs room for an answer. Shorten the prompt."
        )
    return list(ids)


class TextStream:
    """Token ids in, text out, never half a character and never a letter taken back.

    Joined deltas plus `flush` equal the full decoding.
    """

    def __init__(self, target: Target) -> None:
        self._decode = lambda ids: target.tokenizer.decode(
            ids, skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        self._ids: list[int] = []
        # Only a window at the end is decoded anew, which always starts a little before the new
        # tokens, since some tokenizers drop a leading space at the start of a text.
        self._start = 0
        self._whole = 0  # tokens up to the last place where no character was cut
        self._shown = 0  # letters of the window's text that were shown
        self.text = ""

    def push(self, token_ids: list[int]) -> str:
        """Add tokens; returns the text that became certain."""
        delta = ""
        for token in token_ids:
            self._ids.append(token)
            delta += self._advance()
        self.text += delta
        return delta

    def flush(self) -> str:
        """What is still held back, complete or not."""
        delta = self._advance(last=True)
        self.text += delta
        return delta

    def _advance(self, last: bool = False) -> str:
        now = self._decode(self._ids[self._start :])
        held = len(now) - len(now.rstrip(REPLACEMENT))
        if held > MAX_HELD:
            held = MAX_OPEN
        certain = len(now) if last else max(self._shown, len(now) - held)
        delta = now[self._shown : certain]
        self._shown = certain
        if not held:
            self._start, self._whole = self._whole, len(self._ids)
            self._shown = len(self._decode(self._ids[self._start :]))
        elif len(self._ids) - self._start > 4 * MAX_HELD:
            self._shorten(now)
        return delta

    def _shorten(self, now: str) -> None:
        """Move the window along a run of undecodable bytes, where that changes no letter."""
        cut = len(self._ids) - 2 * MAX_HELD
        before = self._decode(self._ids[self._start : cut])
        if before + self._decode(self._ids[cut:]) == now and len(before) <= self._shown:
            self._start, self._shown = cut, self._shown - len(before)
            self._whole = max(self._whole, cut)


def token_label(target: Target, token_id: int) -> str:
    """A token's own text for display; bytes that are no character stand as `<0xE2>`."""
    text = target.tokenizer.decode([token_id], clean_up_tokenization_spaces=False)
    if REPLACEMENT not in text:
        return text
    piece = target.tokenizer.convert_ids_to_tokens(token_id)
    decoder = _byte_decoder()
    if all(letter in decoder for letter in piece):
        raw = bytes(decoder[letter] for letter in piece)
        return "".join(chr(b) if 32 <= b < 127 else f"<0x{b:02X}>" for b in raw)
    return piece


def _byte_decoder() -> dict[str, int]:
    """Byte-level BPE writes each byte as one printable letter; this is the way back."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    letters = {chr(b): b for b in printable}
    letters |= {chr(256 + n): b for n, b in enumerate(b for b in range(256) if b not in printable)}
    return letters
