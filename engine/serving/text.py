"""Text to tokens and back: ChatML prompts, incremental detokenisation, stop strings."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tideforge.errors import MissingExtra, UserError

UNFINISHED = "\ufffd"  # what a decoder writes for bytes that are no character (yet)
LONGEST_HELD = 8  # tokens; a character has at most 4 bytes, so what is still broken then stays broken


class Text:
    """The model folder's tokenizer.json. Special tokens in a user's chat message are text, not markers."""

    def __init__(self, model: Path) -> None:
        path = model / "tokenizer.json"
        if not path.is_file():
            raise UserError(str(path), "does not exist", "give a model folder that holds its tokenizer.json")
        self._special, self._plain = _load(path), _load(path)
        self._plain.encode_special_tokens = True

    @property
    def vocab_size(self) -> int:
        return int(self._special.get_vocab_size())

    def encode(self, text: str) -> tuple[int, ...]:
        """A raw prompt; markers such as <|im_start|> count as such, as in the published completions API."""
        return tuple(self._special.encode(text).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._special.decode(list(ids), skip_special_tokens=True))

    def chat(self, messages: Iterable[tuple[str, str]]) -> tuple[int, ...]:
        """ChatML: <|im_start|>role, newline, content, <|im_end|>, newline; then the opening of the assistant's turn."""
        start, end = (self._special.token_to_id(marker) for marker in ("<|im_start|>", "<|im_end|>"))
        if start is None or end is None:
            raise UserError("messages", "the model has no ChatML markers", "use /v1/completions with a prompt")
        ids: list[int] = []
        for role, content in messages:
            ids += [start, *self._ordinary(f"{role}\n{content}"), end, *self._ordinary("\n")]
        return (*ids, start, *self._ordinary("assistant\n"))

    def _ordinary(self, text: str) -> list[int]:
        return list(self._plain.encode(text, add_special_tokens=False).ids)


def _load(path: Path) -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtra("tokenizers", "serve") from None
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the binding raises bare Exception
        raise UserError(str(path), f"is not a tokenizer ({error})", "take tokenizer.json of the checkpoint") from None


class Detokenizer:
    """Turns tokens into text as they come. A character whose bytes are not all there is held back.

    Two windows are decoded, with and without what is new, because a token's text may depend on the one before it.
    """

    def __init__(self, text: Text) -> None:
        self._text = text
        self._ids: list[int] = []
        self._context = 0  # where the window begins
        self._shown = 0  # ids whose text is out

    def add(self, token: int) -> str:
        self._ids.append(token)
        before = self._text.decode(self._ids[self._context : self._shown])
        now = self._text.decode(self._ids[self._context :])
        held = len(self._ids) - self._shown
        if (now.endswith(UNFINISHED) and held < LONGEST_HELD) or len(now) <= len(before):
            return ""
        self._context, self._shown = self._shown, len(self._ids)
        return now[len(before) :]

    def end(self) -> str:
        """The text still held back, without a character that never became whole."""
        before = self._text.decode(self._ids[self._context : self._shown])
        now = self._text.decode(self._ids[self._context :])
        self._context = self._shown = len(self._ids)
        return now[len(before) :].rstrip(UNFINISHED)


class StopStrings:
    """Cuts text at the first stop string, also one that spans pieces: what could begin one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""
        self.hit = False

    def add(self, piece: str) -> str:
        text = self._held + piece
        found = [at for stop in self._stops if (at := text.find(stop)) >= 0]
        if found:
            self.hit, self._held = True, ""
            return text[: min(found)]
        keep = max((self._overlap(text, stop) for stop in self._stops), default=0)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def end(self) -> str:
        text, self._held = self._held, ""
        return text

    @staticmethod
    def _overlap(text: str, stop: str) -> int:
        """Length of the longest end of `text` that begins `stop`."""
        return next((n for n in range(min(len(stop) - 1, len(text)), 0, -1) if text.endswith(stop[:n])), 0)
