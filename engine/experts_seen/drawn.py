"""The tokens that are compared: text, ids without sense, and what the model itself says behind either."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping, Sequence
from pathlib import Path

from tideforge.engine.blocks import BlockPool
from tideforge.engine.config import Limits, Settings
from tideforge.engine.core import EngineCore
from tideforge.engine.forward import Forward
from tideforge.engine.local import LocalExecutor, LocalMemory
from tideforge.engine.model_config import ModelConfig, model_for
from tideforge.engine.scheduler import Request
from tideforge.engine.train_text import HELD_OUT, read
from tideforge.errors import MissingExtra, UserError

ROOT = Path(__file__).parents[2]
CORPUS, SOURCES, MIXED, RANDOM = "corpus", "sources", "mixed", "random"
Ids = list[int]


def texts_of(model: Path, held_out_of: Sequence[Path] = ()) -> dict[str, Ids]:
    """Token ids of the sample corpus, of this engine's own Python sources, and of the held-out ends of files that a model
    was trained on (train_text.load's)."""
    sources = "".join(path.read_text() for path in sorted((ROOT / "engine").glob("*.py")))
    texts = {CORPUS: encode(model, read(ROOT / "data" / "samples" / "corpus.txt")), SOURCES: encode(model, sources)}
    for path in held_out_of:
        ids = encode(model, read(path))
        texts[path.name.split(".")[0]] = ids[len(ids) - len(ids) // HELD_OUT :]
    return texts


def encode(model: Path, text: str) -> Ids:
    """By the model's tokenizer, line by line."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise MissingExtra("tokenizers", "serve") from None
    file = model / "tokenizer.json"
    if not file.exists():
        raise UserError(str(file), "does not exist", "name a model folder with its tokenizer")
    lines = Tokenizer.from_file(str(file)).encode_batch_fast(list(io.StringIO(text, newline="\n")))
    return [token for line in lines for token in line.ids]


def spans(text: Sequence[int], count: int, length: int, rng: random.Random) -> list[Ids]:
    """Stretches from random places. UserError: the text is too short."""
    if len(text) <= length:
        raise UserError("a text", f"has {len(text)} tokens", f"give more than {length}")
    starts = [rng.randrange(len(text) - length) for _ in range(count)]
    return [list(text[start : start + length]) for start in starts]


def sequences_of(
    texts: Mapping[str, Sequence[int]], vocabulary: int, count: int, length: int, seed: int
) -> dict[str, list[Ids]]:
    """`count` sequences of each kind: one a text, `mixed` (each sequence from a text by chance), `shuffled` (the corpus's tokens, their
    order lost), `random` (any ids), `known` (any ids that the corpus has). A kind's draws do not depend on what other kinds there are."""

    def rng(kind: str) -> random.Random:
        return random.Random(f"{seed} {kind}")

    def nonsense(kind: str, ids: Sequence[int]) -> list[Ids]:
        at = rng(kind)
        return [at.choices(ids, k=length) for _ in range(count)]

    corpus, mixing, shuffling = texts[CORPUS], rng(MIXED), rng("shuffled")
    return {
        **{name: spans(text, count, length, rng(name)) for name, text in texts.items()},
        MIXED: [spans(texts[mixing.choice(list(texts))], 1, length, mixing)[0] for _ in range(count)],
        "shuffled": spans(shuffling.sample(corpus, len(corpus)), count, length, shuffling),
        RANDOM: nonsense(RANDOM, range(vocabulary)),
        "known": nonsense("known", sorted(set(corpus))),
    }


class Speaker:
    """The raw forward as an endpoint runs it, in this process: says what follows, greedily."""

    def __init__(self, model: Path, state: Path, users: int, longest: int) -> None:
        self.users, self.block_size = users, 16
        self.blocks = users * -(-longest // self.block_size) + 1
        self.limits = Limits(max_num_seqs=users, max_num_batched_tokens=512, max_model_len=longest)
        self.forward = Forward.load(model_for(ModelConfig.load(model).architecture))
        memory = LocalMemory(Settings(state, model, dtype="float32", num_blocks=self.blocks, limits=self.limits))
        self.executor = LocalExecutor(self.forward, memory)

    def go_on(self, prompts: Sequence[Ids], count: int) -> list[Ids]:
        """Each prompt with `count` tokens behind it; nothing ends an answer early."""
        core = EngineCore(self.limits, BlockPool(self.blocks, self.block_size, False))
        core.attach(self.forward.id, self.executor)
        whole = [list(prompt) for prompt in prompts]
        for index, prompt in enumerate(prompts):
            core.add(Request(str(index), tuple(prompt), count, forward=self.forward.id))
        while core.has_work():
            for event in core.step():
                whole[int(event.request_id)].append(event.token)
        return whole
