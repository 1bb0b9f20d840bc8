"""What can be refused before a worker is spent on it: source that does not compile, imports that are not allowed."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from tideforge.engine.forward import Forward
from tideforge.errors import CandidateError

ALLOWED = frozenset({"__future__", "torch", "triton", "math", "typing"})
CONTRACT = "tideforge.engine.contract"


def screen(forward: Forward, allow_imports: Iterable[str] = ()) -> None:
    """Raises CandidateError: syntax_error or refused. Static rules decide on nothing but security's import list."""
    own = {name.removesuffix(".py").split("/")[0] for name in forward.files}
    allowed = ALLOWED | own | set(allow_imports)
    for name, text in forward.files.items():
        if not name.endswith(".py"):
            continue
        try:
            tree = ast.parse(text, name)
        except (SyntaxError, ValueError) as error:
            raise CandidateError("syntax_error", f"{name}: {error}") from error
        except (RecursionError, MemoryError) as error:
            raise CandidateError("syntax_error", f"{name}: too deeply nested to be parsed") from error
        for module in _imports(tree):
            if module != CONTRACT and module.split(".")[0] not in allowed:
                raise CandidateError(
                    "refused", f"{name} imports {module}; a forward may import {', '.join(sorted(allowed))}"
                )


def _imports(tree: ast.AST) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.module or ""
