from __future__ import annotations

import re
from pathlib import Path

import pytest
from tokenizers import Tokenizer

from epdd import emulation, families
from epdd.emulation.profile import SHIPPED
from epdd.errors import ConfigError
from epdd.families import DEMO
from epdd.settings import config
from epdd.settings.workers import EmulationSettings

TOKENIZER = Tokenizer.from_file(str(DEMO / "tokenizer.json"))
PUBLISHED = "xeon6747p-5xl40s"
SMALL = """
name = "small"
about = "two workers"
answers = "demo"
[[encoder]]
kind = "cpu"
count = 1
seconds = {a = 1}
[[pd]]
kind = "gpu"
count = 1
prefill_tokens_per_s = 1000
decode = {a = 0.01}
kv_tokens = 4096
context_max = 2048
"""
MODEL = """
[model]
hidden = 8
planes = 2
dtype = "float32"
patch = 4
merge = 2
min_pixels = 64
max_pixels = 256
"""


def load(profile: str, scale: float = 0.0) -> emulation.Emulation:
    made = emulation.load(EmulationSettings(profile, scale), TOKENIZER)
    assert made is not None
    return made


@pytest.mark.parametrize("name", emulation.names())
def test_shipped_profiles_can_be_used_by_the_name_of_their_file(name):
    assert load(name).profile.name == name


def test_without_a_profile_nothing_is_emulated():
    assert emulation.load(EmulationSettings(), TOKENIZER) is None


def test_the_published_set_up():
    made = load(PUBLISHED)
    gpu, cpu = made.profile.encoder
    family = made.family(families.load(str(DEMO)))
    grid = family.grid(1920, 1080)
    patches = grid[1] * grid[2]
    assert family.rows(grid) == 2040 and family.embedding_bytes(2040, "bfloat16") == 2040 * 4096 * 4 * 2
    assert (gpu.kind, gpu.count, round(gpu.image_seconds(patches), 3)) == ("gpu", 1, 0.11)
    assert (cpu.kind, cpu.count, round(cpu.image_seconds(patches), 3)) == ("cpu", 4, 1.32)
    assert sum(pd.count for pd in made.profile.pd) == 4 and family.max_model_len == 32768


def test_times_of_the_router_table_do_not_go_with_the_size():
    gpu, cpu = load("router-table").profile.encoder
    assert {gpu.image_seconds(n) for n in (4, 8160, 65536)} == {0.11}
    assert {cpu.image_seconds(n) for n in (4, 8160, 65536)} == {1.32}


def test_the_demo_model_keeps_its_own_sizes():
    family = families.load(str(DEMO))
    made = load("laptop").family(family)
    assert (made.hidden, made.planes, made.max_pixels) == (family.hidden, family.planes, family.max_pixels)


def test_a_file_and_the_scale(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(SMALL + "[[encoder]]\nkind = 'gpu'\ncount = 2\nseconds = [[16, 0.1], [64, 0.2]]\n")
    made = load(str(file))
    assert made.profile.encoder[1].seconds == ((16, 0.1), (64, 0.2)) and made.needs_torch
    assert made.label() == {"profile": "small", "about": "two workers", "answers": "demo", "scale": 1.0}
    assert load(str(file), 10.0).worker(made.profile.encoder[0]).scale == 10.0


def test_settings_name_the_profile(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "SYSTEM_FILE", tmp_path / "none.toml")
    found, _ = config.load(["--emulate", PUBLISHED, "--set", "emulation.scale=4"], {})
    assert found.emulation == EmulationSettings(PUBLISHED, 4.0)


@pytest.mark.parametrize("old, new, words", [
    ('name = "small"', 'name = "a b"', "name: expected `str` matching regex"),
    ('name = "small"', "", "object missing required field `name`"),
    ('about = "two workers"', 'about = "a\\nb"', "about: "),
    ('answers = "demo"', 'answers = "true"', "answers: invalid enum value 'true'"),
    ('answers = "demo"', 'answers = "rows"', '[model] is needed with answers = "rows"'),
    ("[[pd]]", MODEL + "[[pd]]", '[model] is needed with answers = "rows"'),
    ('answers = "demo"', 'answers = "demo"\nscale = 0', "scale: expected `float` >= 0.001"),
    ('answers = "demo"', 'answers = "demo"\nspeed = 1', "object contains unknown field `speed`"),
    ("count = 1\nseconds", "count = 0\nseconds", "encoder[0].count: expected `int` >= 1"),
    ("count = 1\nseconds", "count = true\nseconds", "encoder[0].count: expected `int`, got `bool`"),
    ('kind = "cpu"', 'kind = "tpu"', "encoder[0].kind: invalid enum value 'tpu'"),
    ("{a = 1}", "{a = -1}", "encoder[0].seconds.a: expected `float` >= 0.0"),
    ("{a = 1}", "{a = nan}", "encoder[0].seconds.a: expected `float` >= 0.0"),
    ("{a = 1}", "{a = inf}", "encoder[0].seconds.a: expected `float` <= 100000.0"),
    ("{a = 1}", "{d = 1}", "encoder[0].seconds: object contains unknown field `d`"),
    ("{a = 1}", "{}", "encoder[0].seconds: a, b and c must not all be 0"),
    ("{a = 1}", "[]", "encoder[0].seconds: expected `array` of length >= 1"),
    ("{a = 1}", "[[64, 0.2], [16, 0.3]]", "encoder[0]: seconds: the patches of samples must rise"),
    ("{a = 1}", "[[16, 0.2], [64, 0.1]]", "encoder[0]: seconds: the patches of samples must rise"),
    ("{a = 1}", "[[16, 0]]", "encoder[0]: seconds: a sample's seconds must be over 0"),
    ("{a = 1}", "{a = 1}\njitter = 3", "encoder[0].jitter: expected `float` <= 2.0"),
    ("{a = 1}", "{a = 1}\nslow = [{after_s = 1}]", "encoder[0].slow[0]: object missing required field `factor`"),
    ("{a = 1}", "{a = 1}\nslow = [{after_s = 2, factor = 2}, {after_s = 1, factor = 1}]",
     "encoder[0]: slow: after_s must rise"),
    ("kv_tokens = 4096", "kv_tokens = 1", "pd[0].kv_tokens: expected `int` >= 64"),
    ("[[pd]]", "[[decode]]", "object contains unknown field `decode`"),
    ("[[pd]]", "[[pd", "line "),
])
def test_bad_profiles_name_file_and_field(tmp_path, old, new, words):
    file = tmp_path / "bad.toml"
    assert old in SMALL
    file.write_text(SMALL.replace(old, new, 1))
    with pytest.raises(ConfigError, match="(?i)" + re.escape(f"{file}: ") + ".*" + re.escape(words)):
        emulation.read(str(file))


def test_bad_sizes_of_a_model(tmp_path):
    file = tmp_path / "bad.toml"
    file.write_text(SMALL.replace('"demo"', '"rows"') + MODEL.replace("min_pixels = 64", "min_pixels = 257"))
    with pytest.raises(ConfigError, match="model: max_pixels must hold min_pixels"):
        emulation.read(str(file))


def test_an_unknown_name_says_what_there_is(tmp_path):
    with pytest.raises(ConfigError, match=f"no file nothing.*{PUBLISHED}"):
        emulation.read("nothing")
    with pytest.raises(ConfigError, match="Is a directory"):
        emulation.read(str(tmp_path))


@pytest.mark.parametrize("scale", [1e-9, 1e4])
def test_a_scale_that_no_clock_can_follow(scale):
    with pytest.raises(ConfigError, match="emulation.scale"):
        emulation.load(EmulationSettings(PUBLISHED, scale), TOKENIZER)


def test_profiles_are_package_data():
    setup = (Path(__file__).parents[2] / "setup.cfg").read_text()
    assert "emulation/profiles/*" in setup and list(SHIPPED.glob("*.toml"))
