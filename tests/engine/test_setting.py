"""What a trial is measured against: equal after a restart, another one as soon as anything changes that changes a figure."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tideforge.data.workload import RequestShape, Workload
from tideforge.engine import tuning
from tideforge.engine.archive import Archive, read_trials
from tideforge.engine.config import Limits, Settings
from tideforge.engine.doubles import tiny_llama
from tideforge.engine.events import read_events
from tideforge.engine.forward import Forward
from tideforge.engine.objective import Objective
from tideforge.engine.outcome import Outcome
from tideforge.engine.service import Service
from tideforge.engine.service_config import ServiceConfig
from tideforge.engine.setting import FILE, Setting, id_of
from tideforge.errors import UserError

A, B = Forward({"forward.py": "a = 1\n", "knobs.json": "{}"}), Forward({"forward.py": "b = 2\n", "knobs.json": "{}"})
SHAPES = (RequestShape(6, 4),)


@pytest.fixture
def config(tmp_path: Path) -> ServiceConfig:
    model = tiny_llama(tmp_path / "model")
    state = tmp_path / "s"
    work = tmp_path / "workload.json"
    work.write_text(Workload(2, SHAPES, SHAPES, (1, 2, 3), profile="p", seed=0).to_json())
    return ServiceConfig(Settings(state, model), tmp_path, A.save(state / "forwards"), work)


def with_settings(config: ServiceConfig, **changes: Any) -> ServiceConfig:
    return dataclasses.replace(config, settings=dataclasses.replace(config.settings, **changes))


def another_workload(config: ServiceConfig) -> ServiceConfig:
    raw = json.loads(config.workload.read_text())
    config.workload.write_text(json.dumps({**raw, "users": 8}))
    return config


def other_weights(config: ServiceConfig) -> ServiceConfig:
    (path,) = config.settings.model.glob("*.safetensors")
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    os.utime(path, ns=(1, 1))
    return config


def another_model(config: ServiceConfig) -> ServiceConfig:
    path = config.settings.model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "rope_theta": 5.0}))
    return config


CHANGES = {
    "objective": lambda c: dataclasses.replace(c, objective=Objective("ttft")),
    "incumbent": lambda c: dataclasses.replace(c, incumbent=B.save(c.settings.state / "forwards")),
    "workload": another_workload,
    "weights": other_weights,
    "limits": lambda c: with_settings(c, limits=Limits(max_num_seqs=4)),
    "dtype": lambda c: with_settings(c, dtype="bfloat16"),
    "device": lambda c: with_settings(c, device="cuda"),
    "passes": lambda c: dataclasses.replace(c, passes=7),
    "noise_trials": lambda c: dataclasses.replace(c, noise_trials=3),
    "bandwidth_bytes_per_s": lambda c: dataclasses.replace(c, bandwidth_bytes_per_s=1e12),
}


@pytest.mark.parametrize("name", CHANGES)
def test_what_changes_a_figure_is_another_setting_and_is_named(config: ServiceConfig, name: str) -> None:
    before = Setting.of(config)
    after = Setting.of(CHANGES[name](config))
    assert after.id != before.id and after.differs(before) == before.differs(after) == [name]


def test_another_model_of_the_same_shapes_is_another_setting(config: ServiceConfig) -> None:
    before = Setting.of(config)
    assert Setting.of(another_model(config)).differs(before) == ["weights"]


def test_places_times_and_scheduling_are_no_part_of_it(config: ServiceConfig, tmp_path: Path) -> None:
    moved = shutil.copytree(config.settings.model, tmp_path / "moved")
    same = with_settings(config, model=moved, state=tmp_path / "t", spares=3, lookahead=5, dry_runs=False)
    copy = shutil.copy(config.workload, tmp_path / "copy.json")
    same = dataclasses.replace(same, exit_at=5.0, night=tmp_path / "n", workload=Path(copy))
    assert Setting.of(same) == Setting.of(config)


def test_every_lane_of_several_devices_has_the_setting_of_one(config: ServiceConfig) -> None:
    several = dataclasses.replace(config, devices=("cuda:0", "cuda:1"))
    ids = {Setting.of(one).id for one in (several, *several.lanes, with_settings(config, device="cuda"))}
    assert len(ids) == 1


def test_it_is_read_as_it_was_written(config: ServiceConfig, tmp_path: Path) -> None:
    assert Setting.read(tmp_path) is None and id_of(tmp_path) == ""
    setting = Setting.of(config)
    setting.write(tmp_path)
    assert Setting.read(tmp_path) == setting and id_of(tmp_path) == setting.id
    for damage in ("", "[]", "{}", '{"objective": 1}', '{"objective": {'):
        (tmp_path / FILE).write_text(damage)
        with pytest.raises(UserError, match=r"setting\.json: is damaged"):
            id_of(tmp_path)


def test_a_forward_is_a_new_trial_under_another_setting(tmp_path: Path) -> None:
    def of(setting: str) -> Archive:
        return Archive(tmp_path, tmp_path / "forwards", setting)

    one = of("one")
    first, waits = one.submit(A, "slow", "x"), one.submit(B, "slow", "x")
    one.finish(dataclasses.replace(first, outcome=Outcome.WRONG, finished_at=1.0))
    other = of("other")
    assert other.present == other.waiting == []
    second = other.submit(A, "slow", "x")
    assert second.id not in (first.id, waits.id) and not second.done and second.setting == "other"
    assert [trial.id for trial in other.waiting] == [second.id] and other.cancel_waiting("over") == 1
    back = of("one")
    assert back.submit(A, "slow", "x").outcome is Outcome.WRONG and [trial.id for trial in back.waiting] == [waits.id]
    written = {trial.id: trial.setting for trial in read_trials(tmp_path)}
    assert written == {first.id: "one", waits.id: "one", second.id: "other"}
    for trial, name in ((first, "submission.json"), (first, "result.json"), (second, "submission.json")):
        assert json.loads((tmp_path / "trials" / trial.id / name).read_text())["setting"] == trial.setting


def test_trials_of_before_settings_were_written_down_are_of_another_one(tmp_path: Path) -> None:
    old = Archive(tmp_path, tmp_path / "forwards")
    trial = old.submit(A, "slow", "x")
    path = tmp_path / "trials" / trial.id / "submission.json"
    path.write_text(json.dumps({key: value for key, value in json.loads(path.read_text()).items() if key != "setting"}))
    new = Archive(tmp_path, tmp_path / "forwards", "now")
    assert new.trials[trial.id].setting == "" and new.present == [] and new.submit(A, "slow", "x").id != trial.id


def test_a_number_is_not_given_twice_though_a_trial_is_lost(tmp_path: Path) -> None:
    one = Archive(tmp_path, tmp_path / "forwards", "one")
    first, second = one.submit(A, "slow", "x"), one.submit(B, "slow", "x")
    (tmp_path / "trials" / first.id / "submission.json").write_text("{")
    again = Archive(tmp_path, tmp_path / "forwards", "two", set_aside=True)
    assert [trial.id for trial in again.trials.values()] == [second.id]
    assert again.submit(B, "slow", "x").id > second.id


def test_a_service_gives_out_trials_of_its_own_setting_only(config: ServiceConfig) -> None:
    def told(service: Service) -> list[str]:
        return [json.loads(text)["id"] for text in service.answer({"type": "trials"})["trials"]]

    submitted = {"type": "submit", "files": dict(B.files), "tier": "slow", "submitter": "x"}
    before = Service(config)
    name = before.answer(submitted)["id"]
    assert told(before) == [name] == told(Service(config)), "an unchanged setting goes on"
    after = Service(CHANGES["objective"](config))
    assert told(after) == [] and after.queue.idle and after.answer(submitted)["id"] != name
    assert json.loads(after.answer({"type": "trial", "id": name})["trial"])["id"] == name


def tuned(config: ServiceConfig) -> dict[str, Any]:
    """The knobs that a bench of this config would take without a search, 7 tokens where none are known."""
    own = SimpleNamespace(knobs={"max_num_batched_tokens": 7}, id="incumbent")
    bounds = dataclasses.make_dataclass("Bounds", [])()
    bench: Any = SimpleNamespace(
        config=dataclasses.replace(config, tune=False), incumbent=own, lab=config, bounds=bounds
    )
    found = tuning.tuned_knobs(bench)
    own.knobs = found
    tuning.write_tuned(bench, "served")
    return found


def test_knobs_are_found_again_for_another_setting_and_kept_for_the_same(config: ServiceConfig) -> None:
    assert tuned(config) == {"max_num_batched_tokens": 7}
    path = config.night / "tuned.json"
    raw = json.loads(path.read_text())
    (setting,) = raw["by_setting"]
    path.write_text(json.dumps({**raw, "by_setting": {setting: {"threads": 2}}}))
    assert tuned(config) == {"threads": 2} == json.loads(path.read_text())["knobs"]
    assert tuned(CHANGES["objective"](config)) == {"max_num_batched_tokens": 7} == json.loads(path.read_text())["knobs"]
    assert tuned(config) == {"threads": 2}, "candidates of before hold these"


def test_knobs_of_before_settings_were_written_down_are_found_again(config: ServiceConfig) -> None:
    (config.night / "tuned.json").write_text('{"knobs": {"threads": 2}, "incumbent": "i", "served": "s"}')
    assert tuned(config) == {"max_num_batched_tokens": 7}
    assert not (config.night / "tuned.json.damaged").exists()


@pytest.mark.parametrize(
    "damage",
    ["", '{"knobs": ', "[]", "{}", '{"knobs": {}, "by_setting": 7}', '{"knobs": {"no_such": 1}}', '{"knobs": 3}'],
)
def test_damaged_knobs_are_set_aside_and_found_again(config: ServiceConfig, damage: str) -> None:
    path = config.night / "tuned.json"
    path.write_text(damage)
    assert tuned(config) == {"max_num_batched_tokens": 7}
    aside = path.with_name("tuned.json.damaged")
    assert aside.read_text() == damage and json.loads(path.read_text())["knobs"] == {"max_num_batched_tokens": 7}
    assert [event["path"] for event in read_events(config.night) if event["event"] == "damaged"] == [str(aside)]
