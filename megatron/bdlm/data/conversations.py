"""Fine-tuning items to pieces: tokens, which of them the model is trained on, and where blocks count anew.

A line of a JSON lines file is one item, in one of three forms:

    {"messages": [{"role": "user", "content": ".."}, {"role": "assistant", ..}, ..]}   the tokenizer's chat template
    {"prompt": "..", "completion": ".."}                                               plain text, an end token behind
    {"tokens": [5, 9, ..], "mask": [0, 1, ..]}                                         ids, 1 = supervised

Supervised is the content of the assistant turns with the end-of-turn token behind it; what the template writes around
them belongs to the prompts, and so does a turn without text (a tool call). Blocks count anew at the start of every
answer and of every prompt after it, so that no block holds an answer and the prompt that follows: such a block would
show the answer its future.

A turn is tokenized by itself, as at sampling, where the prompt stands alone before the answer exists.
"""

import json
from collections.abc import Callable
from typing import Any, Optional

import numpy as np

from megatron.bdlm.data.documents import DataError, Record
from megatron.bdlm.data.packing import Piece
from megatron.bdlm.data.tokenizers import end_of_document_id, mask_token_id, vocabulary_size

MARKER = "bdlm5f1c0answer9e7d"
"""Stands for an answer when its place in the rendered conversation is sought"""

Segment = tuple[list[int], bool]
"""Ids and whether they are supervised"""


class ConversationEncoder:
    """Encodes the items of one tokenizer.

    Args:
        tokenizer: the engine's tokenizer.
        mask: the run's mask token, which no item may contain; default: the tokenizer's own.
    """

    def __init__(self, tokenizer: Any, mask: Optional[int] = None) -> None:
        self.tokenizer = tokenizer
        self.size = vocabulary_size(tokenizer)
        self.end = end_of_document_id(tokenizer)
        self.mask = mask_token_id(tokenizer) if mask is None else mask
        self.fast = getattr(getattr(tokenizer, "_tokenizer", None), "tokenizer", None)  # None: not a Hugging Face one
        self.start: list[int] = []
        self.special: tuple[str, ...] = ()  # texts of the special tokens, longest first
        if self.fast is not None:
            bos = self.fast.bos_token_id
            self.start = [bos] if bos is not None and self.fast("a").input_ids[:1] == [bos] else []
            added = {entry.content for entry in self.fast.added_tokens_decoder.values() if entry.special}
            self.special = tuple(sorted(added | set(self.fast.all_special_tokens), key=len, reverse=True))

    def encode(self, record: Record) -> Piece:
        """One item.

        Raises:
            DataError: the line is broken, has none of the three forms, or its ids cannot be used; names file and line.
        """
        fields = _fields(record)
        forms: list[tuple[str, Callable[[dict[str, Any], str], list[Segment]]]] = [
            ("messages", self._messages),
            ("prompt", self._completion),
            ("tokens", self._ids),
        ]
        for key, encode in forms:
            if key in fields:
                return self._piece(encode(fields, record.place), record.place)
        keys = ", ".join(map(repr, fields)) or "no key"
        raise DataError(
            f"{record.place}: an item has 'messages', 'prompt' and 'completion', or 'tokens' and 'mask'; this one has "
            f"{keys}"
        )

    def _piece(self, segments: list[Segment], place: str) -> Piece:
        segments = [segment for segment in segments if segment[0]]
        tokens = np.array([token for ids, _ in segments for token in ids], dtype=np.int64)
        eligible = np.array([supervised for ids, supervised in segments for _ in ids], dtype=bool)
        if tokens.size and not (0 <= tokens.min() and tokens.max() < self.size):
            outside = int(tokens.max() if tokens.max() >= self.size else tokens.min())
            raise DataError(f"{place}: token id {outside} is outside the vocabulary of {self.size} tokens")
        if self.mask is not None and (tokens == self.mask).any():
            raise DataError(
                f"{place}: the item contains the mask token (id {self.mask}), which must never be a real token"
            )
        turns = np.flatnonzero(np.diff(eligible)) + 1
        return Piece(tokens, eligible, tuple(turns.tolist()))

    def _text(self, text: str) -> list[int]:
        """Ids of a text, without the special tokens that a tokenizer puts around a whole input."""
        if self.fast is None:
            return list(self.tokenizer.tokenize(text)) if text else []
        return self.fast(text, add_special_tokens=False).input_ids

    def _completion(self, fields: dict[str, Any], place: str) -> list[Segment]:
        for key in ("prompt", "completion"):
            if not isinstance(fields.get(key), str):
                raise DataError(f"{place}: {key!r} must be a string")
        answer = self._text(fields["completion"])
        if self.end is not None:
            answer = [*answer, self.end]
        return [([*self.start, *self._text(fields["prompt"])], False), (answer, True)]

    def _ids(self, fields: dict[str, Any], place: str) -> list[Segment]:
        tokens, mask = fields["tokens"], fields.get("mask")
        integers = isinstance(tokens, list) and all(
            isinstance(token, int) and not isinstance(token, bool) for token in tokens
        )
        if not integers or not isinstance(mask, list) or any(flag not in (0, 1) for flag in mask):
            raise DataError(f"{place}: 'tokens' must be a list of integers and 'mask' a list of 0 and 1")
        if len(tokens) != len(mask):
            raise DataError(f"{place}: {len(tokens)} tokens but {len(mask)} mask values; each token needs one")
        return [([token], bool(flag)) for token, flag in zip(tokens, mask)]

    def _messages(self, fields: dict[str, Any], place: str) -> list[Segment]:
        messages = fields["messages"]
        if (
            not isinstance(messages, list)
            or not messages
            or not all(isinstance(m, dict) and "role" in m for m in messages)
        ):
            raise DataError(f"{place}: 'messages' must be a list of objects with 'role' and 'content'")
        if self.fast is None or not self.tokenizer.chat_template:
            raise DataError(f"{place}: 'messages' need a tokenizer with a chat template; give one with --chat-template")
        whole = self._render(messages, place)
        segments: list[Segment] = []
        done = 0
        for number, message in enumerate(messages):
            if message["role"] != "assistant" or not isinstance(message.get("content"), str):
                continue
            begin, end = self._answer_span(messages, number, whole, place)
            end = self._with_end_of_turn(whole, end)
            segments += [(self._text(whole[done:begin]), False), (self._text(whole[begin:end]), True)]
            done = end
        return [*segments, (self._text(whole[done:]), False)]

    def _answer_span(self, messages: list[dict[str, Any]], number: int, whole: str, place: str) -> tuple[int, int]:
        """Characters of `whole` that message `number` wrote: what changes when its content does.

        The conversation is rendered again with a marker in place of the content; what stands before and behind the
        marker is not the answer. So the template may write what it likes around an answer, and may treat earlier turns
        otherwise than the last one (templates that drop earlier reasoning do).
        """
        marked = [*messages[:number], {**messages[number], "content": MARKER}, *messages[number + 1 :]]
        parts = self._render(marked, place).split(MARKER)
        if len(parts) != 2 or not whole.startswith(parts[0]) or not whole[len(parts[0]) :].endswith(parts[1]):
            raise DataError(
                f"{place}: the chat template does not write message {number} once as it is, so that the answer cannot "
                "be told apart; give 'tokens' and 'mask', or another template"
            )
        return len(parts[0]), len(whole) - len(parts[1])

    def _with_end_of_turn(self, whole: str, end: int) -> int:
        """`end` moved behind the special token that follows the answer, if one does: the model writes it to stop."""
        rest = whole[end:]
        blank = len(rest) - len(rest.lstrip())
        for token in self.special:
            if rest.startswith(token, blank):
                return end + blank + len(token)
        return end

    def _render(self, messages: list[dict[str, Any]], place: str) -> str:
        try:
            return self.tokenizer.apply_chat_template(messages, tokenize=False)
        except Exception as error:
            # A template is a program of the tokenizer's author: it may raise anything.
            raise DataError(f"{place}: the chat template refuses the messages: {error}") from error


def _fields(record: Record) -> dict[str, Any]:
    try:
        fields = json.loads(record.data.decode("utf-8-sig" if record.line <= 1 else "utf-8").rstrip("\r\n"))
    except UnicodeDecodeError as error:
        raise DataError(f"{record.place}: byte {error.start} is not UTF-8") from error
    except json.JSONDecodeError as error:
        raise DataError(f"{record.place}: broken JSON at column {error.colno}: {error.msg}") from error
    if not isinstance(fields, dict):
        raise DataError(f"{record.place}: a line must be a JSON object, this one is a {type(fields).__name__}")
    return fields
