"""One forward verified alone, outside a night: what `tideforge verify` does."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine.compare import Bounds
from tideforge.engine.config import Settings
from tideforge.engine.forward import Forward
from tideforge.engine.lab import end_keeper, keeper_status
from tideforge.engine.reference import Reference
from tideforge.engine.screen import screen
from tideforge.errors import CandidateError, UserError
from tideforge.tasks.corpus import corpus_ids
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.incumbent import serving_forward
from tideforge.tasks.machine import check_endpoint, floor_figures, settings_for
from tideforge.tasks.night import runs_root
from tideforge.tasks.objective import measured
from tideforge.tasks.profile import HELD_OUT_A_USER, read_workload
from tideforge.tasks.store import Run
from tideforge.tasks.verify.examine import examine
from tideforge.tasks.verify.plan import Plan, choosable, unknown
from tideforge.tasks.verify.verdict import Verdict


@dataclasses.dataclass(frozen=True)
class Question:
    """What is verified. `gates`: all if empty. `against` is timed beside it."""

    endpoint: Endpoint
    candidate: Forward
    against: Forward
    gates: tuple[str, ...] = ()
    pairs: int = 0

    @classmethod
    def of(cls, endpoint: Endpoint, forward: str, against: str | None, gates: Sequence[str], pairs: int) -> Question:
        """Raises UserError for whatever cannot be found or may not run."""
        check_endpoint(endpoint)
        if wrong := unknown(gates):
            raise UserError("--gates", f"there is no gate {wrong[0]!r}", f"there are {', '.join(choosable())}")
        candidate = find_forward(endpoint, forward)
        try:
            screen(candidate, endpoint.allow_imports)
        except CandidateError as error:
            raise UserError(
                forward, f"{error.outcome}: {error.message}", "mend it, or name it in allow_imports"
            ) from None
        other = serving_forward(endpoint) if against is None else find_forward(endpoint, against)
        return cls(endpoint, candidate, other, tuple(gates), pairs)


def find_forward(endpoint: Endpoint, name: str) -> Forward:
    """A folder, or the id of a forward in the endpoint's state folder (its beginning is enough)."""
    folder = Path(name)
    if not folder.is_dir():
        found = sorted((endpoint.state / "forwards").glob(f"{name}*")) if name.isalnum() else []
        if len(found) != 1:
            problem = "is no folder, and no forward there has this id" if not found else f"begins {len(found)} ids"
            raise UserError(name, problem, f"give a forward's folder or an id of {endpoint.state / 'forwards'}")
        folder = found[0]
    try:
        return Forward.load(folder)
    except (CandidateError, OSError, ValueError) as error:
        raise UserError(str(folder), f"is not a forward ({error})", "mend its files") from None


def verify_alone(question: Question, progress: Callable[[str], None]) -> Verdict:
    """The gates, and held-out pairs when they are asked for. Ends the keeper if it started it."""
    endpoint, settings = question.endpoint, settings_for(question.endpoint)
    workload, origin = requests(endpoint)
    progress(f"requests: {origin}")
    with keeper_as_it_was(settings.state):
        bounds = derived(settings, workload)
        progress(f"bound of an emitted token: {bounds.logit_gap:.4g} logits below the reference's best")
        plan = Plan(question.pairs, question.pairs, math.inf, question.gates or None)
        return examine(
            settings, settings.state, question.against, question.candidate, workload, bounds, plan, progress,
            objective=measured(endpoint), floor=floor_figures(endpoint),
        )  # fmt: skip


def derived(settings: Settings, workload: Workload) -> Bounds:
    """As a search derives them, on its own half of the text."""
    with contextlib.closing(Reference.start(settings.model, settings.state, device=settings.device)) as reference:
        return reference.bounds(settings.dtype, workload.corpus[: len(workload.corpus) // 2])


@contextlib.contextmanager
def keeper_as_it_was(state: Path) -> Iterator[None]:
    ran = keeper_status(state) is not None
    try:
        yield
    finally:
        if not ran:
            end_keeper(state)


def requests(endpoint: Endpoint) -> tuple[Workload, str]:
    """The newest run's workload; without any, one of the sizes that the endpoint file gives. And which of both it is."""
    root = runs_root(endpoint)
    runs = [Run(path) for path in sorted(root.iterdir()) if path.is_dir()] if root.is_dir() else []
    made = [run for run in runs if run.manifest("workload") is not None]
    if made:
        newest = max(made, key=lambda run: run.need("workload").finished)
        return read_workload(newest), f"of run {newest.id}"
    spec = endpoint.workload
    places = [index % 2 for index in range(HELD_OUT_A_USER * spec.users)]
    ranges = [(one, one) if isinstance(one, int) else one for one in (spec.search_output_tokens, spec.output_tokens)]
    parts = [tuple(RequestShape(spec.prompt_tokens[end], tokens[end]) for end in places) for tokens in ranges]
    text = tuple(corpus_ids(endpoint))
    return Workload(spec.users, parts[0], parts[1], text, "", spec.seed), "no run has any; sizes of the endpoint file"
