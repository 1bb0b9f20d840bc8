"""Candidates made of the plain forward and harm: a folder of kinds, one file each, and where each stands in a candidate.

A kind is a module with `harm(what)` and `OUTCOMES`, what comes of it by phase (import, build, forward, after, instead).
"""

from __future__ import annotations

import importlib.util
import mmap
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import ModuleType

from tideforge.engine.forward import Forward

Kinds = Mapping[str, ModuleType]
LEAST_HANG_S = 4.0
FILLS = 3  # so many times what filling all memory takes is a hang: the machine is shared
PROBE = 128 << 20  # bytes

# Where a harm of each phase stands in a candidate. `harm` gets what the phase has: nothing, ctx, or the batch.
WRAP = """

class Harmed:
    def __init__(self, inner):
        self.inner = inner

    def __call__(self, batch):
{forward}


_plain = build


def build(ctx):
{build}
    return Harmed(_plain(ctx))


{module}
"""


def kinds(*folders: Path) -> dict[str, ModuleType]:
    """The files of these folders as modules, by name. Importing one does nothing."""
    found = {}
    for path in (path for folder in folders for path in sorted(folder.glob("*.py"))):
        spec = importlib.util.spec_from_file_location(f"harm_{path.stem}", path)
        assert spec is not None and spec.loader is not None
        found[path.stem] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(found[path.stem])
    return found


def hang_s(memory_bytes: int) -> float:
    """An import or a build that takes longer is called hung where a worker may hold so much. One that takes all of it and is to
    be seen at that needs the time that this machine, as busy as it is, takes to hand it out: measured here on a part."""
    begin = time.perf_counter()
    with mmap.mmap(-1, PROBE) as probe:
        probe.write(bytes(PROBE))
    return max(LEAST_HANG_S, FILLS * (time.perf_counter() - begin) * memory_bytes / PROBE)


def expected(kind: ModuleType, phase: str, on_gpu: bool) -> tuple[str, ...]:
    """Outcomes that are right; a kind may name others for a GPU (ON_GPU)."""
    told = getattr(kind, "ON_GPU", {}).get(phase) if on_gpu else None
    return tuple(told) if told else (kind.OUTCOMES[phase],)


def candidate(plain: Forward, parts: Sequence[tuple[str, str]], of: Kinds) -> Forward:
    """The plain forward that also does each (phase, harm)."""
    files = dict(plain.files)

    def calls(phase: str, argument: str, indent: int) -> str:
        names = [name for at, name in parts if at == phase]
        return "".join(f"{' ' * indent}harm_{name}.harm({argument})\n" for name in names) or f"{' ' * indent}pass\n"

    instead = any(phase == "instead" for phase, _ in parts)
    inner = calls("instead", "batch", 8) if instead else "        self.inner(batch)\n"
    wrapped = WRAP.format(
        forward=calls("forward", "batch", 8) + inner + calls("after", "batch", 8),
        build=calls("build", "ctx", 4), module=calls("import", "None", 0),
    )  # fmt: skip
    imports = "".join(f"import harm_{name}\n" for _, name in parts)
    head = "from __future__ import annotations\n"
    files["forward.py"] = files["forward.py"].replace(head, head + imports) + wrapped
    for _, name in parts:
        files[f"harm_{name}.py"] = Path(str(of[name].__file__)).read_text()
    return Forward(files)
