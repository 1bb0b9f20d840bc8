"""The real text that prompts of a workload are cut from, as token ids of the endpoint's own tokenizer."""

from __future__ import annotations

from importlib import resources
from pathlib import Path

from tideforge.tasks.endpoint import Endpoint

TOKENS = 65536  # a trial draws far fewer; more would only make the workload file large


def corpus_ids(endpoint: Endpoint) -> list[int]:
    """Ids of data/samples/corpus.txt. UserError when the model folder has no tokenizer.json."""
    from tideforge.engine.serving.text import Text

    text = Path(str(resources.files("tideforge.data") / "samples" / "corpus.txt")).read_text()
    return list(Text(endpoint.model).encode(text)[:TOKENS])
