"""Approval: the unsigned release record with its form, a person's decision, and nights that supersede older ones.

Nothing here can approve. The flow runs this code and holds no key: an approval without a valid signature is refused
here, early, so that the run keeps waiting; and by the server in the end.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tideforge.data.files import canonical_json, read_json, write_whole
from tideforge.engine.forward import Forward
from tideforge.engine.release import Decision, Gain, Release, load_forward, read_approvers, verify
from tideforge.errors import Refused, UserError
from tideforge.tasks.endpoint import Endpoint
from tideforge.tasks.facts import Night, forward_folder, why_failed
from tideforge.tasks.store import Manifest, Run

NOT_WANTED = "the night was told to end with the verdict"
REFUSED_KEPT, REFUSED_TEXT = 5, 200  # forms, and characters of what each says of itself
FORGOTTEN = "remove it: the count of refused forms begins anew"


def state_of(run: Run) -> Path:
    return run.folder.parent.parent


def prepare_release(run: Run, endpoint: Endpoint, wanted: bool = True) -> Manifest:
    """Writes release.json: outputs record, form, diff. Without a verified finalist no outputs, and extra says why.

    `wanted` false: none is made and no server is asked. Called again with true, it is made after all.
    """
    from tideforge.tasks.form import diff, write_form

    night = Night.read(run)
    inputs = {
        "verify": night.hashes().get("verify.verdict", ""),
        "endpoint": run.need("run").inputs.get("endpoint", ""),
    }
    if not wanted:
        inputs["wanted"] = "no"
    if done := run.done("release", inputs):
        return done
    started = time.time()
    if problem := _why_not(night) or ("" if wanted else NOT_WANTED):
        return run.finish("release", inputs, {}, {"waits": False, "problem": problem}, started)
    release = _record(night, endpoint)
    _stage(run, release.forward)
    changes = run.write_bytes("diff", ".diff", diff(run, release).encode())
    form = write_form(night, endpoint, release, run.folder / changes.path)
    outputs = {
        "record": run.write_json("release", release.to_record()),
        "form": run.write_bytes("form", ".md", form.encode()),
        "diff": changes,
    }
    extra = {"waits": True, "forward": release.forward, "nonce": release.nonce, "expires_at": release.expires_at}
    supersede_older(run, release)  # first: a run killed in between has no release yet and comes by here again
    return run.finish("release", inputs, outputs, extra, started)


def describe(run: Run, endpoint: Endpoint) -> str:
    """The form's text, in Markdown."""
    return run.path(run.need("release"), "form").read_text()


def _why_not(night: Night) -> str:
    """Empty when the finalist may wait for a person."""
    verdict = night.verdict
    if not night.finalist:
        return "no candidate was faster than the incumbent beyond doubt"
    if verdict is None:
        return "the finalist was not verified"
    if verdict["passed"] is not True:
        return why_failed(verdict)
    if verdict["forward"] != night.finalist or verdict["incumbent"] != night.incumbent:
        return "the verdict is about another forward than the search's finalist and incumbent"
    if verdict["ci_low"] <= 1:
        return f"on held-out requests the lower bound of the ratio is {verdict['ci_low']:.3f}, not above 1"
    return ""


def _record(night: Night, endpoint: Endpoint) -> Release:
    from tideforge.tasks.live import environment_of, version

    server, verdict, now = version(state_of(night.run)), night.verdict or {}, int(time.time())
    _same(server, verdict, endpoint)
    served = str(night.extra("search").get("served") or night.incumbent)  # the incumbent measured has its knobs tuned
    return Release(
        run=night.run.id,
        endpoint=endpoint.name,
        forward=str(night.finalist),
        incumbent=served,
        layout=str(night.extra("rank").get("layout", "unchanged")),
        weights_sha256=str(verdict["weights_sha256"]),
        launch=endpoint.launch,
        environment=environment_of(server),
        verdict_sha256=night.manifests["verify"].outputs["verdict"].sha256,
        gain=Gain.of(verdict["ratio"], verdict["ci_low"], verdict["ci_high"], len(verdict["pairs"])),
        created_at=now,
        expires_at=now + int(endpoint.approval_hours * 3600),
        previous=str(server["release"]),
        go_back=f"tideforge rollback returns to forward {served[:12]}",
    )


def _same(server: dict[str, Any], verdict: dict[str, Any], endpoint: Endpoint) -> None:
    """What was verified is what the server runs, as far as both say; else there is nothing to approve."""
    if server["launch"] != endpoint.launch:
        raise UserError("launch", "the server was started otherwise than the endpoint file says", "restart the server")
    if server["weights_sha256"] != verdict["weights_sha256"]:
        raise UserError(
            "weights", "the server serves other weights than those verified", "restart it, or run verify again"
        )
    measured = verdict.get("environment") or {}
    for name, value in server["environment"].items():
        if name in measured and str(measured[name]) != value:
            problem = f"is {value} in the server and was {measured[name]} when verified"
            raise UserError(f"environment: {name}", problem, "restart the server, or run verify again")


def _stage(run: Run, forward: str) -> None:
    """The verified files under <state>/forwards, where the server looks; refuses files that hash to something else."""
    folder = forward_folder(run, forward)
    if folder is None:
        raise UserError(f"forward {forward[:12]}", "has no files in the archive", "run the search again")
    loaded = Forward.load(folder)
    if loaded.id != forward:
        raise UserError(str(folder), "does not hash to its name: a file was changed", "run the search again")
    loaded.save(state_of(run) / "forwards")


def read_release(run: Run) -> Release:
    """The unsigned record of a run. Raises Refused when there is none or it was changed since it was written."""
    manifest = run.manifest("release")
    if manifest is None:
        raise Refused(f"run {run.id} has no release to decide on: it was not verified yet")
    if "record" not in manifest.outputs:
        raise Refused(f"run {run.id} has nothing to ship: {manifest.extra.get('problem', 'no release')}")
    return Release.from_record(_intact(run, manifest, "record"))


def check_release(run: Run) -> Release:
    """What a signer and the ship node ask of the run folder. Raises Refused with the reason; returns the record."""
    release = read_release(run)
    if release.run != run.id:
        raise Refused(f"the record is about run {release.run}, not {run.id}")
    if (run.folder / "superseded.json").exists():
        newer = read_json(
            run.folder / "superseded.json", lambda raw: str(raw["by"]), "restore it: a newer night stands"
        )
        raise Refused(f"superseded: the newer night {newer} of this endpoint stands")
    verified = run.manifest("verify")
    if verified is None:
        raise Refused("the forward was not verified")
    verdict = _intact(run, verified, "verdict")
    if verified.outputs["verdict"].sha256 != release.verdict_sha256:
        raise Refused("the verdict is not the one that the release was made from")
    if verdict.get("passed") is not True or verdict.get("forward") != release.forward:
        raise Refused(f"forward {release.forward[:12]} is not the one that passed verification")
    load_forward(state_of(run) / "forwards", release.forward)
    if time.time() > release.expires_at:
        raise Refused(f"the release expired {time.time() - release.expires_at:.0f} s ago")
    return release


def _intact(run: Run, manifest: Manifest, name: str) -> Any:
    try:
        return run.read_json(manifest, name)
    except (UserError, KeyError):
        raise Refused(f"the {name} of node {manifest.node} is missing or was changed after it was written") from None


def decide(
    run: Run, endpoint: Endpoint, approve: bool = False, code: str = "", who: str = "", why: str = ""
) -> Manifest:
    """Writes approval.json, once. Raises Refused, and the run waits on, when the code does not sign this decision.

    That goes for a rejection too: whoever reaches the form could else throw a night away. `who` is the approver's name by
    the key, whatever the form claims.
    """
    release = read_release(run)
    wanted = Decision.APPROVE if approve else Decision.REJECT
    inputs = {"release": run.need("release").outputs["record"].sha256}
    if (earlier := run.done("approval", inputs)) is not None:
        if earlier.extra["decision"] == wanted:
            return earlier
        raise Refused(f"this run was decided already: {earlier.extra['decision']} by {earlier.extra['who']}")
    signer = _signer(run, release, wanted, code.strip())
    facts = {"decision": str(wanted), "who": signer, "why": why, "at": time.time(), "signed": True}
    output = run.write_json("approval", {**facts, "code": code.strip(), "claimed_who": who})
    return run.finish("approval", inputs, {"decision": output}, facts)


def _signer(run: Run, release: Release, wanted: Decision, code: str) -> str:
    """Name of the approver whose key made the code."""
    if wanted is Decision.APPROVE:
        check_release(run)
    approved = verify(release.to_record(), code, read_approvers(state_of(run) / "approvers.json"))
    if approved.decision is not wanted:
        raise Refused(f"the code signs {approved.decision}, not {wanted}")
    return approved.who


def count_refusal(run: Run, form: Mapping[str, Any], reason: str) -> None:
    """refused.json: how many forms decided nothing, and the last few in short. It never grows beyond that."""
    count, _ = refusals(run)
    path = run.folder / "refused.json"
    last = read_json(path, lambda raw: list(raw["last"]), FORGOTTEN) if count else []
    said = {name: str(form.get(name, ""))[:REFUSED_TEXT] for name in ("who", "why")}
    entry = {"at": time.time(), "approve": bool(form.get("approve")), **said, "reason": reason[:REFUSED_TEXT]}
    write_whole(path, canonical_json({"count": count + 1, "last": [*last, entry][-REFUSED_KEPT:]}))


def refusals(run: Run) -> tuple[int, str]:
    """How many forms were refused, and why the last one was."""
    path = run.folder / "refused.json"
    if not path.exists():
        return 0, ""
    return read_json(path, lambda raw: (int(raw["count"]), str(raw["last"][-1]["reason"])), FORGOTTEN)


def supersede_older(run: Run, release: Release) -> list[str]:
    """Marks older runs of the same endpoint that still wait; returns their ids."""
    marked = []
    for folder in sorted(run.folder.parent.iterdir()):
        other = Run(folder)
        if folder == run.folder or not folder.is_dir():
            continue
        if (done := other.manifest("ship")) is not None and done.extra.get("shipped"):
            continue
        manifest = other.manifest("release")
        if manifest is None or "record" not in manifest.outputs or (folder / "superseded.json").exists():
            continue
        record = other.read_json(manifest, "record")
        if record["endpoint"] == release.endpoint and record["created_at"] <= release.created_at:
            write_whole(folder / "superseded.json", canonical_json({"by": run.id, "at": time.time()}))
            marked.append(other.id)
    return marked
