"""Text to train on: files to tokens of the byte tokenizer, a held-out end of each, random windows, some of them as a chat."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import lzma
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tideforge.engine.doubles import SPECIALS, VOCAB, byte_tokenizer
from tideforge.errors import MissingExtra, UserError

HELD_OUT = 50  # one part of so many, at the end of each file
CHAT = 8  # one window of so many is cut into a user's message and an answer that goes on from it
PIECE_BYTES = 1 << 16


@dataclasses.dataclass(frozen=True)
class Held:
    """Tokens that are never trained on."""

    name: str
    ids: Tensor

    def windows(self, context: int, most: int) -> Tensor:
        """At most `most` stretches, evenly spread, [count, context + 1]; a text that is shorter is one stretch."""
        context = min(context, len(self.ids) - 1)
        stretches = self.ids.unfold(0, context + 1, context)
        chosen = torch.linspace(0, len(stretches) - 1, min(len(stretches), most)).long()
        return stretches[chosen.to(self.ids.device)]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """What is trained on, as one row of tokens; what is held out, by file; SHA-256 of each file's text."""

    train: Tensor
    held: tuple[Held, ...]
    sha256: dict[str, str]

    def sample(self, rows: int, context: int, generator: torch.Generator) -> Tensor:
        """[rows, context + 1] from random places of the training text, on its device. The generator lives on the CPU."""
        starts = torch.randint(len(self.train) - context, (rows, 1), generator=generator).to(self.train.device)
        windows = self.train[starts + torch.arange(context + 1, device=self.train.device)]
        chats = windows[: rows // CHAT]
        cuts = torch.randint(1, max(2, context // 2), (len(chats),), generator=generator).tolist()
        for row, cut in zip(chats, cuts, strict=True):
            row.copy_(as_chat(row, cut))
        return windows


def as_chat(ids: Tensor, cut: int) -> Tensor:
    """The user says the first `cut` tokens, the assistant goes on; as long as it was, so the end is lost."""
    before, between = (
        torch.tensor(encode(text), device=ids.device)
        for text in (f"{SPECIALS[1]}user\n", f"{SPECIALS[2]}\n{SPECIALS[1]}assistant\n")
    )
    return torch.cat((before, ids[:cut], between, ids[cut:]))[: len(ids)]


def load(files: Sequence[Path], unseen: Sequence[Path], device: torch.device, least: int) -> Corpus:
    """`files` are trained on but for their ends, `unseen` not at all; .xz is unpacked. UserError: unreadable, or too short."""
    seen, held, hashes = [], [], {}
    for path in (*files, *unseen):
        text, name = read(path), path.name.removesuffix(".xz")
        ids = torch.tensor(encode(text), dtype=torch.long, device=device)
        end = 0 if path in unseen else len(ids) - len(ids) // HELD_OUT
        seen.append(ids[:end])
        hashes[name] = hashlib.sha256(text.encode()).hexdigest()
        if len(ids) - end > 1:
            held.append(Held(name, ids[end:]))
    train = torch.cat(seen)
    if len(train) <= least:
        raise UserError("--text", f"has {len(train)} tokens to train on", f"give more than {least}")
    return Corpus(train, tuple(held), hashes)


def read(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (lzma.decompress(raw) if path.suffix == ".xz" else raw).decode()
    except (OSError, lzma.LZMAError, UnicodeDecodeError) as error:
        remedy = "give a UTF-8 text file, or one packed by xz"
        raise UserError(str(path), f"cannot be read as text ({error})", remedy) from None


def encode(text: str) -> list[int]:
    """Ids of the byte tokenizer. No merge crosses the end of a line, so pieces of whole lines are encoded side by side."""
    return [token for piece in _tokenizer().encode_batch_fast(list(_pieces(text))) for token in piece.ids]


@functools.cache
def _tokenizer() -> Any:
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtra("tokenizers", "serve") from None
    return Tokenizer.from_str(json.dumps(byte_tokenizer()))


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while start < len(text):
        end = text.find("\n", start + PIECE_BYTES) + 1 or len(text)
        yield text[start:end]
        start = end


def token_bytes() -> Tensor:
    """How many bytes of text each of the tokenizer's entries stands for, [vocab]; none for markers."""
    sizes = torch.zeros(VOCAB, dtype=torch.long)
    for token, index in byte_tokenizer()["model"]["vocab"].items():
        sizes[index] = 0 if token in SPECIALS else len(token)
    return sizes
