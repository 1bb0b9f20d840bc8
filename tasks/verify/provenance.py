"""Gate: nobody wrote this package's source, the search's archive, the forwards' own files or the weights meanwhile.

That the forward verified is the one that ships is release.py's: it names the hash, and the server computes it again.
"""

from __future__ import annotations

from typing import Any

from tideforge.engine.gates.caught import Caught
from tideforge.tasks.verify.trialled import Trialled


def provenance(trialled: Trialled) -> dict[str, Any]:
    changes = trialled.seal.changes()
    if not trialled.lab.weights_intact():
        changes.append("the weights' checksum is another than before; they are restored")
    if changes:
        raise Caught(f"{'; '.join(changes[:3])}; {len(changes)} in all")
    return {"files": len(trialled.seal.hashes)}
