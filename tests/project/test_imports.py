"""Dependencies point one way: data, costmodel <- engine <- tasks <- flows; heavy packages only where they belong."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
MAY_IMPORT = {
    "data": {"data"},
    "costmodel": {"costmodel", "data"},
    "engine": {"engine", "data", "costmodel"},
    "tasks": {"tasks", "engine", "data", "costmodel"},
    "flows": {"flows", "tasks", "engine", "data", "costmodel"},
}
ONLY_IN = {
    "torch": ("engine/",),
    "triton": ("engine/",),
    "prefect": ("flows/", "tasks/forms.py", "tasks/stack.py"),
    "mlflow": ("tasks/track.py",),
    "duckdb": ("data/", "tasks/"),
    "cryptography": ("engine/keys.py",),
    "openai": ("tasks/search/",),
    "anthropic": ("tasks/search/",),
}


def modules() -> list[Path]:
    return [path for area in MAY_IMPORT for path in sorted((ROOT / area).rglob("*.py"))]


def imports(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            yield node.module or ""
            if node.module == "tideforge":
                yield from (f"tideforge.{alias.name}" for alias in node.names)


@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_point_one_way(path: Path) -> None:
    area = path.relative_to(ROOT).parts[0]
    for name in imports(path):
        parts = name.split(".")
        if parts[0] == "tideforge" and len(parts) > 1 and parts[1] in MAY_IMPORT:
            assert parts[1] in MAY_IMPORT[area], f"{area} may not import {name}"
        if parts[0] in MAY_IMPORT:
            raise AssertionError(f"{path}: the import name is tideforge.{name}")
        if parts[0] in ONLY_IN:
            relative = path.relative_to(ROOT).as_posix()
            assert relative.startswith(ONLY_IN[parts[0]]), f"{relative} may not import {parts[0]}"


def test_the_authority_runs_without_torch() -> None:
    code = (
        "import sys; import tideforge.engine.service, tideforge.engine.client, tideforge.engine.lab; "
        "print(sorted({m.split('.')[0] for m in sys.modules} & {'torch', 'duckdb', 'pandas', 'pydantic', 'prefect'}))"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert result.stdout.strip() == "[]"
