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


# What a forward rarely needs and a cheat often does. Names of modules, attributes and functions, whatever they belong to.
NOTEWORTHY = {
    "threads": ("threading", "thread", "_thread", "Thread", "ThreadPoolExecutor", "start_new_thread", "concurrent"),
    "processes": ("subprocess", "multiprocessing", "fork", "Popen", "system", "kill", "execv", "spawn"),
    "foreign code": ("ctypes", "cffi", "CDLL", "load_inline", "cpp_extension", "eval", "exec", "compile_source", "__import__"),
    "operating system": ("os", "sys", "environ", "getenv", "argv", "mmap", "shutil", "pathlib", "signal"),
    "files": ("open", "fromfile", "memmap", "from_file", "read_text", "write_text", "tofile"),
    "network": ("socket", "urllib", "http", "requests"),
    "time": ("time", "perf_counter", "monotonic", "sleep", "Event", "record_event", "elapsed_time"),
    "other objects": ("gc", "inspect", "_getframe", "currentframe", "get_objects", "get_referrers", "__globals__", "f_back"),
    "patching": ("setattr", "__dict__", "__class__", "modules", "__subclasses__", "builtins", "__builtins__"),
    "global flags": ("backends", "set_num_threads", "set_default_dtype", "set_float32_matmul_precision", "manual_seed"),
    "other streams": ("Stream", "stream", "current_stream", "set_stream"),
    "cheaper precision": ("int8", "uint8", "float8_e4m3fn", "float8_e5m2", "quantize_per_tensor", "quantize_per_channel"),
    "addresses": ("data_ptr", "untyped_storage", "_version", "set_"),
}  # fmt: skip


def findings(forward: Forward) -> list[str]:
    """What a reviewer should look at, a line for each kind and file: `threads: Thread (forward.py, line 7)`. Decides nothing."""
    found: list[str] = []
    for file, text in sorted(forward.files.items()):
        if file.endswith(".py"):
            seen = _names(text, file)
            for kind, names in NOTEWORTHY.items():
                if lines := {name: seen[name] for name in names if name in seen}:
                    first = min(lines.values())
                    found.append(f"{kind}: {', '.join(sorted(lines))} ({file}, line {first})")
    return found


def _names(text: str, file: str) -> dict[str, int]:
    """Names, attributes, parts of imports and of dotted strings -> their first line."""
    seen: dict[str, int] = {}
    for node in ast.walk(ast.parse(text, file)):
        for name in _named(node):
            seen[name] = min(seen.get(name, 1 << 30), getattr(node, "lineno", 1))
    return seen


def _named(node: ast.AST) -> Iterable[str]:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            yield name
        case ast.Import(names=names):
            yield from (part for alias in names for part in alias.name.split("."))
        case ast.ImportFrom(module=module, names=names):
            yield from ((module or "").split("."))
            yield from (alias.name for alias in names)
        case ast.Constant(value=str(text)) if text.isidentifier():
            yield text  # getattr(torch, "os")
