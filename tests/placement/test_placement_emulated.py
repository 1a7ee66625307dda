from __future__ import annotations

import pytest
from tokenizers import Tokenizer

from epdd import emulation, families, placement
from epdd.errors import PlacementError
from epdd.families import DEMO
from epdd.fleet.placement_watcher import keep_names
from epdd.hardware.probe import probe
from epdd.settings.config import Config
from epdd.settings.worker_overrides import WorkerOverride
from epdd.settings.workers import EmulationSettings
from epdd.wire import WorkerSpec

TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))


def plan(profile: str = "xeon6747p-5xl40s", **settings: dict[str, object]) -> list[WorkerSpec]:
    values = Config()
    for section, fields in settings.items():
        values = values.with_values(section, fields, "test")
    made = emulation.load(EmulationSettings(profile), TOKENIZER)
    assert made is not None
    return placement.plan(probe(), values, made.family(families.load(str(DEMO))), 1 << 20, made)


def test_the_profile_decides_and_nothing_is_bound() -> None:
    specs = plan()
    assert [(spec.name, spec.device) for spec in specs] == [
        ("encoder/0", "cuda:0"), *((f"encoder/{i}", "cpu") for i in range(1, 5)),
        *((f"pd/{i}", f"cuda:{i + 1}") for i in range(4))]
    assert {(spec.cpus, spec.numa_node) for spec in specs} == {((), None)}
    assert {(spec.kv_tokens, spec.max_model_len) for spec in specs if spec.role == "pd"} == {(160_000, 32_768)}
    assert sum(spec.arena_slice[1] for spec in specs) == 1 << 20


def test_a_plan_made_anew_moves_nobody() -> None:
    assert keep_names(plan(), plan()) == plan()


@pytest.mark.parametrize("workers, devices", [
    ("gpu:1", ["cuda:0"]), ("gpu:1,cpu:2", ["cuda:0", "cpu", "cpu"]), ("cpu:1", ["cpu"]), (2, ["cuda:0", "cpu"])])
def test_workers_can_be_left_out(workers: object, devices: list[str]) -> None:
    specs = plan(encoder={"workers": workers}, pd={"workers": 3})
    assert [spec.device for spec in specs if spec.role == "encoder"] == devices
    assert sum(spec.role == "pd" for spec in specs) == 3


def test_more_than_the_profile_has_is_refused() -> None:
    with pytest.raises(PlacementError, match="encoder.workers is 'gpu:2'; the profile has gpu:1,cpu:4"):
        plan(encoder={"workers": "gpu:2"})
    with pytest.raises(PlacementError, match="pd.workers is '5'"):
        plan(pd={"workers": 5})


def test_tables_of_real_workers_are_refused() -> None:
    made = emulation.load(EmulationSettings("laptop"), TOKENIZER)
    with pytest.raises(PlacementError, match="tables place real workers"):
        placement.plan(probe(), Config(worker=(WorkerOverride("pd"),)), families.load(str(DEMO)), 1 << 20, made)


def test_settings_lower_what_the_profile_allows() -> None:
    pd = [spec for spec in plan("laptop", pd={"kv_tokens": 2048}, model={"max_model_len": 1024}) if spec.role == "pd"]
    assert [(spec.kv_tokens, spec.max_model_len) for spec in pd] == [(2048, 1024)]
