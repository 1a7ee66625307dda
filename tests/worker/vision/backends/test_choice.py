from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from epdd import wire
from epdd.worker.vision.backends import Planes, Run, choice, cpu, relative_error, remembered
from epdd.worker.vision.tower import Tower
from tests.worker.language import pd
from tests.worker.vision.test_tower import loaded


class Invented(cpu.Plain):
    """torch's products with a fault; the test gives its speed."""

    def __init__(self, name: str, wrong: float = 0.0, wrong_whole: float = 0.0, fault: str = "",
                 missing: str = "") -> None:
        self.name = name
        self.prepared = 0
        self._wrong, self._wrong_whole, self._fault, self._missing = wrong, wrong_whole, fault, missing

    def missing(self, tower: Tower) -> str:
        return self._missing

    def prepare(self, tower: Tower) -> Run:
        self.prepared += 1
        if self._fault:
            raise RuntimeError(self._fault)
        factor = 1 + self._wrong + (self._wrong_whole if len(tower.module.blocks) > 1 else 0.0)
        if factor != 1:
            tower.module.blocks[0].norm1.weight.zero_()     # what it spoils must not be left behind

        def run(patches: torch.Tensor, grids: list[tuple[int, int, int]]) -> Planes:
            return [plane * factor for plane in tower(patches, grids)]

        return run


@pytest.fixture
def tower(checkpoint: Callable[..., str]) -> Tower:
    return loaded(checkpoint("qwen3_vl"))


@pytest.fixture
def raced(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Say what each backend's time shall be."""
    def fix(**seconds: float) -> None:
        monkeypatch.setattr(choice, "_race", lambda runs, large, progress: {name: seconds[name] for name in runs})
        monkeypatch.setattr(choice, "SLOW", 1e9)
    return fix


def chosen(tower: Tower, backends: list[Invented | cpu.Plain], path: Path | None = None) -> choice.BackendChoice:
    return choice.choose(tower, backends, remembered.Memory(path, {"of": "a test"}), lambda done: None)


def test_the_fastest_right_one_is_taken(tower: Tower, raced: Callable[..., None]) -> None:
    raced(torch=3.0, fast=1.0, middle=2.0)
    made = chosen(tower, [cpu.Plain(), Invented("middle"), Invented("fast"), Invented("absent", missing="not here"),
                          Invented("broken", fault="no kernel\nmore"), Invented("wrong", wrong=0.01)])
    assert made.name == "fast"
    assert {trial.backend: (trial.seconds, trial.note) for trial in made.trials} == {
        "torch": (3.0, ""), "middle": (2.0, ""), "fast": (1.0, ""), "absent": (0.0, "not here"),
        "broken": (0.0, "RuntimeError: no kernel"),
        "wrong": (0.0, made.trials[-1].note)}
    assert made.trials[-1].note.startswith("off by")


def test_one_that_is_wrong_in_the_whole_tower_gives_way_to_the_next(tower: Tower, raced: Callable[..., None]) -> None:
    raced(torch=3.0, fast=1.0)
    batch = choice.probe(tower, 64)
    wanted = tower(*batch)
    made = chosen(tower, [cpu.Plain(), Invented("fast", wrong_whole=0.5)])
    assert made.name == "torch" and "off by" in made.trials[1].note
    assert relative_error(made.run(*batch), wanted) == 0.0


def test_what_was_remembered_is_not_measured_again(tower: Tower, raced: Callable[..., None], tmp_path: Path) -> None:
    raced(torch=3.0, fast=1.0)
    first = chosen(tower, [cpu.Plain(), Invented("fast")], tmp_path)
    raced(torch=1.0, fast=3.0)
    again = Invented("fast")
    tower.reload()
    assert chosen(tower, [cpu.Plain(), again], tmp_path).trials == first.trials and again.prepared == 1
    tower.reload()
    assert choice.choose(tower, [cpu.Plain(), Invented("fast")], remembered.Memory(tmp_path, {"of": "another"}),
                         lambda done: None).name == "torch"


def test_a_remembered_one_that_fails_is_measured_anew(tower: Tower, raced: Callable[..., None], tmp_path: Path) -> None:
    raced(torch=3.0, fast=1.0)
    assert chosen(tower, [cpu.Plain(), Invented("fast")], tmp_path).name == "fast"
    tower.reload()
    made = chosen(tower, [cpu.Plain(), Invented("fast", fault="driver gone")], tmp_path)
    assert made.name == "torch" and made.trials[1].note == "RuntimeError: driver gone"


def test_one_that_is_hopelessly_slow_does_not_take_part(tower: Tower, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "SLOW", 0.0)
    made = chosen(tower, [cpu.Plain(), Invented("slow")])
    assert made.name == "torch" and "times as slow as torch" in made.trials[1].note


@pytest.mark.parametrize("data", [b"", b"{}", b"[1]", b'{"backend": 3, "trials": []}', b"\xff\x00"])
def test_a_damaged_memory_is_none(tmp_path: Path, data: bytes) -> None:
    memory = remembered.Memory(tmp_path, {})
    known = remembered.Known("prepacked", (wire.Trial("prepacked", 0.5), wire.Trial("ipex", 0.0, "not installed")))
    memory.write(known)
    assert memory.read() == known and os.listdir(tmp_path) == [memory.path.name if memory.path else ""]
    assert memory.path is not None
    memory.path.write_bytes(data)
    assert memory.read() is None


def test_no_other_user_can_write_into_the_memory(tmp_path: Path) -> None:
    """With any umask: a pipe there would block a worker's start."""
    before = os.umask(0)
    try:
        memory = remembered.Memory(tmp_path / "epdd", {})
        memory.write(remembered.Known("plain", ()))
    finally:
        os.umask(before)
    assert (tmp_path / "epdd").stat().st_mode & 0o777 == 0o700
    assert memory.read() == remembered.Known("plain", ())


def test_without_a_place_to_write_nothing_is_remembered_and_nothing_fails(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for folder in (None, tmp_path / "file" / "below"):
        memory = remembered.Memory(folder, {})
        memory.write(remembered.Known("torch", ()))
        assert memory.read() is None


@pytest.mark.parametrize("environ, wanted", [
    ({"CACHE_DIRECTORY": "/var/cache/epdd:/other", "XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/var/cache/epdd"),
    ({"XDG_CACHE_HOME": "/x", "HOME": "/h"}, "/x/epdd"), ({"HOME": "/h"}, "/h/.cache/epdd"), ({}, None)])
def test_where_the_memory_lies(environ: dict[str, str], wanted: str | None) -> None:
    assert remembered.folder(environ) == (Path(wanted) if wanted else None)


def test_another_checkpoint_setting_or_thread_count_is_another_memory(checkpoint: Callable[..., str],
                                                                      monkeypatch: pytest.MonkeyPatch) -> None:
    folder = checkpoint("qwen3_vl")
    spec = pd.spec(folder, "encoder")

    def path(spec: wire.WorkerSpec = spec, dtype: str = "float32", backends: tuple[str, ...] = ("torch", "prepacked"),
             missing: dict[str, str] | None = None) -> Path | None:
        return remembered.Memory(Path("/nowhere"), remembered.facts(spec, dtype, backends, missing or {})).path

    same = path()
    assert path() == same
    others = [path(pd.spec(checkpoint("qwen2_vl"), "encoder")), path(dtype="bfloat16"),
              path(backends=("torch", "prepacked", "int8")), path(missing={"ipex": "not installed"})]
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert len({same, *others, path()}) == 6
