"""The run folder: nodes hand over content-addressed files, and a node's manifest, written last, says that it is done.

A node whose manifest names the same input hashes and whose outputs still hash to what it says is not run again: that
is how a night resumes. Everything here is readable with `ls` and `cat`.
"""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from tideforge.data.files import FULL as DISK_FULL
from tideforge.data.files import canonical_json, disk_full, sha256_bytes, sha256_file, whole, write_whole
from tideforge.errors import UserError

NAME = re.compile(r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
SHORT = 16  # hex digits of the hash that stand in a file's name; the manifest carries all 64


class Record(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Output(Record):
    path: str = Field(description="relative to the run folder, so that the folder can be moved")
    sha256: str


class Manifest(Record):
    """What a node read and wrote. `extra` holds small figures (counts, ids) that others want without opening a file."""

    node: str
    inputs: dict[str, str] = Field(description="name -> SHA-256 or another value that changes when the input does")
    outputs: dict[str, Output]
    extra: dict[str, Any] = Field(default_factory=dict)
    started: float = Field(description="seconds since the epoch")
    finished: float

    @property
    def seconds(self) -> float:
        return self.finished - self.started


class Run:
    """One night's folder. `Run(folder)` trusts that it exists; `create` and `open` check."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @property
    def id(self) -> str:
        return self.folder.name

    @classmethod
    def create(cls, root: Path, run_id: str) -> Run:
        """A new folder `root/run_id`; UserError when there is one already."""
        folder = root / checked(run_id)
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            raise UserError(str(folder), "exists already", "open that run or choose another run id") from None
        except OSError as error:
            if error.errno in DISK_FULL:
                raise disk_full(root) from error
            raise UserError(str(folder), f"cannot be made ({error.strerror})", "mend the endpoint's `state`") from None
        return cls(folder)

    @classmethod
    def open(cls, root: Path, run_id: str) -> Run:
        folder = root / checked(run_id)
        if not folder.is_dir():
            known = sorted(path.name for path in root.iterdir() if path.is_dir()) if root.is_dir() else []
            raise UserError(str(folder), "no such run", f"runs there: {', '.join(known[-5:]) or 'none'}")
        return cls(folder)

    def write_bytes(self, stem: str, suffix: str, raw: bytes) -> Output:
        """Writes `<stem>-<hash><suffix>`; `suffix` starts with a dot."""
        digest = sha256_bytes(raw)
        name = f"{checked(stem)}-{digest[:SHORT]}{suffix}"
        write_whole(self.folder / name, raw)
        return Output(path=name, sha256=digest)

    def write_json(self, stem: str, value: Any) -> Output:
        return self.write_bytes(stem, ".json", canonical_json(value))

    def add_file(self, stem: str, source: Path) -> Output:
        """Copies a file in under its hash and its own suffix."""
        digest = sha256_file(source)
        name = f"{checked(stem)}-{digest[:SHORT]}{source.suffix}"
        with whole(self.folder / name) as temporary:
            shutil.copyfile(source, temporary)
        return Output(path=name, sha256=digest)

    def finish(
        self,
        node: str,
        inputs: Mapping[str, str],
        outputs: Mapping[str, Output],
        extra: Mapping[str, Any] | None = None,
        started: float | None = None,
    ) -> Manifest:
        """The node's last act. `started` (seconds since the epoch) is now where it is not given."""
        now = time.time()
        manifest = Manifest(
            node=node,
            inputs=dict(inputs),
            outputs=dict(outputs),
            extra=dict(extra or {}),
            started=now if started is None else started,
            finished=now,
        )
        write_whole(self.folder / f"{checked(node)}.json", canonical_json(manifest.model_dump(mode="json")))
        return manifest

    def manifest(self, node: str) -> Manifest | None:
        """What is written, unchecked; None when the node has not finished. UserError when it cannot be read."""
        path = self.folder / f"{checked(node)}.json"
        try:
            return Manifest.model_validate_json(path.read_bytes())
        except FileNotFoundError:
            return None
        except ValidationError:
            raise UserError(str(path), "is not a manifest", "delete it and run the node again") from None

    def need(self, node: str) -> Manifest:
        """The manifest of a node that must have run before."""
        manifest = self.manifest(node)
        if manifest is None:
            raise UserError(str(self.folder), f"the node {node} has not run", f"run {node} for this run first")
        return manifest

    def done(self, node: str, inputs: Mapping[str, str]) -> Manifest | None:
        """The manifest when it names exactly these inputs and every output is whole; otherwise None: run the node."""
        manifest = self.manifest(node)
        if manifest is None or manifest.inputs != dict(inputs):
            return None
        return manifest if all(self.intact(output) for output in manifest.outputs.values()) else None

    def intact(self, output: Output) -> bool:
        path = self.folder / output.path
        return path.is_file() and sha256_file(path) == output.sha256

    def path(self, manifest: Manifest, name: str) -> Path:
        return self.folder / manifest.outputs[name].path

    def read_json(self, manifest: Manifest, name: str) -> Any:
        """An output as JSON. UserError when the manifest lacks it, the file is gone or no longer has its hash."""
        output = manifest.outputs.get(name)
        if output is None:
            path = self.folder / f"{manifest.node}.json"
            raise UserError(str(path), f"names no {name}", f"run {manifest.node} again")
        if not self.intact(output):
            path = self.folder / output.path
            raise UserError(str(path), "is missing or was changed", f"run {manifest.node} again")
        return json.loads((self.folder / output.path).read_bytes())


def checked(name: str) -> str:
    if not NAME.match(name):
        raise UserError(repr(name), "cannot be a file name", "use letters, digits, '.', '_' and '-'")
    return name
