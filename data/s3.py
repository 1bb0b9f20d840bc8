"""Logs in S3 or what speaks like it, through pyarrow. Address, region and credentials come from the standard AWS_
variables (AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL for a server other than Amazon's), files and roles.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

import pyarrow as pa
import pyarrow.fs

from tideforge.errors import UserError

SCHEME = "s3://"
WILD = re.compile(r"[*?\[]")
TIMEOUT_S = 20.0


@dataclasses.dataclass(frozen=True, order=True)
class S3Object:
    url: str
    state: str  # size and time of the last change: another value when the object was replaced

    def __str__(self) -> str:
        return self.url

    @property
    def name(self) -> str:
        return self.url.rsplit("/", 1)[-1]


def connect() -> pa.fs.S3FileSystem:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    region = os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    options = {"connect_timeout": TIMEOUT_S, "request_timeout": 3 * TIMEOUT_S, "region": region}
    if endpoint:
        parts = urlsplit(endpoint)
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise UserError("AWS_ENDPOINT_URL", "is no http(s) address", "write it as http://HOST:PORT")
        options |= {"endpoint_override": parts.netloc, "scheme": parts.scheme, "region": region or "us-east-1"}
    return pa.fs.S3FileSystem(**options)


@contextlib.contextmanager
def explained(url: str) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowException) as error:
        reason = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        remedy = "check the address, the AWS_ variables and what the credentials may read"
        raise UserError(url, f"cannot be read ({reason})", remedy) from None


def under(pattern: str) -> list[tuple[str, S3Object]]:
    """(path below the folder that the pattern names, object); the path of one object is its name.

    A pattern is an object, a folder (all below it) or has wildcards (`**` crosses folders).
    """
    path = pattern.removeprefix(SCHEME).rstrip("/")
    fixed = path[: found.start()].rpartition("/")[0] if (found := WILD.search(path)) else path
    if not fixed:
        raise UserError(pattern, "names no bucket", "write s3://BUCKET/PATH")
    with explained(pattern):
        files = connect()
        info = files.get_file_info(fixed)
        if info.type == pa.fs.FileType.File:
            return [(info.base_name, described(info))]
        infos = files.get_file_info(pa.fs.FileSelector(fixed, allow_not_found=True, recursive=True))
    objects = [info for info in infos if info.type == pa.fs.FileType.File]
    if found:
        matches = re.compile(translated(path)).fullmatch
        return [(info.base_name, described(info)) for info in objects if matches(info.path)]
    return [(info.path.removeprefix(fixed + "/"), described(info)) for info in objects]


def described(info: pa.fs.FileInfo) -> S3Object:
    return S3Object(SCHEME + info.path, f"{info.size} bytes, {info.mtime_ns} ns")


def translated(pattern: str) -> str:
    """A shell pattern as a regular expression; `*` and `?` stay within a folder, `**/` crosses any number."""
    out = ""
    for part in re.findall(r"\*\*/|\*\*|\*|\?|\[[^\]/]+\]|.", pattern):
        known = {"**/": "(?:.*/)?", "**": ".*", "*": "[^/]*", "?": "[^/]"}
        one_of = len(part) > 2 and part.startswith("[")
        out += known.get(part) or (part.replace("[!", "[^").replace("\\", "\\\\") if one_of else re.escape(part))
    return out


def open_object(thing: S3Object) -> pa.NativeFile:
    with explained(thing.url):
        return connect().open_input_file(thing.url.removeprefix(SCHEME))
