"""tokenizer.json of a byte-level BPE, in the format of the `tokenizers` library, from a vocabulary and merges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


def tokenizer_json(
    vocab: Mapping[str, int], merges: Sequence[Sequence[str]], specials: Mapping[str, int], split_digits: bool = False
) -> dict[str, Any]:
    """`specials` are matched in raw text before anything else; `split_digits` makes each digit a token of its own."""
    flags = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    digits = {"type": "Digits", "individual_digits": True}
    split = {"type": "Sequence", "pretokenizers": [digits, byte_level]} if split_digits else byte_level
    model = {
        "type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
        "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
        "vocab": dict(vocab), "merges": [list(pair) for pair in merges],
    }  # fmt: skip
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [{"id": number, "content": token, **flags} for token, number in specials.items()],
        "normalizer": None,
        "pre_tokenizer": split,
        "post_processor": None,
        "decoder": byte_level,
        "model": model,
    }


def byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level BPE: itself if printable, else the next from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    alphabet, spare = [], 0x100
    for byte in range(256):
        alphabet.append(chr(byte if byte in printable else spare))
        spare += byte not in printable
    return alphabet
