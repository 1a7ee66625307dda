import re
import tomllib
from dataclasses import fields
from pathlib import Path

import pytest

from epdd import config
from epdd.config import SECTIONS, Config
from epdd.errors import ConfigError

REFERENCE = Path(__file__).parents[1] / "etc" / "epdd.toml"
SETTING = re.compile(r"^#(?=[a-z_]+ = )", re.MULTILINE)


@pytest.fixture
def no_system_file(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "SYSTEM_FILE", tmp_path / "none.toml")


def load(*argv, **environ):
    return config.load(argv, environ)[0]


def test_reference_file_as_shipped_changes_nothing():
    assert config.from_file(Config(), REFERENCE) == Config()


def test_reference_file_shows_every_setting_at_its_default(tmp_path):
    bare = tmp_path / "bare.toml"
    bare.write_text(SETTING.sub("", REFERENCE.read_text()))
    assert config.from_file(Config(), bare) == Config()
    tables = tomllib.loads(bare.read_text())
    assert {name: set(table) for name, table in tables.items()} == {
        name: {field.name for field in fields(section)} for name, section in SECTIONS.items()}


def test_later_sources_win(no_system_file, tmp_path):
    file = tmp_path / "epdd.toml"
    file.write_text("[server]\nport = 1\nhost = 'a'\nrequests_max = 7\ntimeout_s = 5\n[media]\nallow = ['x', 'y:80']\n")
    found = load("--config", str(file), "--port", "3", "--set", "server.timeout_s=9.5", "--model", "/m",
                 EPDD_SERVER_PORT="2", EPDD_SERVER_HOST="b", EPDD_LOG_LEVEL="debug", EPDD_OTHER="x", PATH="/bin")
    assert (found.server.requests_max, found.server.host, found.server.port, found.server.timeout_s) == (7, "b", 3, 9.5)
    assert (found.media.allow, found.log.level, found.model.path) == (("x", "y:80"), "debug", "/m")


def test_system_file_is_read_where_it_is(monkeypatch, tmp_path):
    monkeypatch.setattr(config, "SYSTEM_FILE", tmp_path / "epdd.toml")
    assert load() == Config()
    (tmp_path / "epdd.toml").write_text("[log]\nlevel = 'error'\n")
    assert load().log.level == "error"


def test_texts_become_values(no_system_file):
    found = load("--set", "admin.mode=0o660", "--set", "media.allow= a , b,", "--set", "router.ratio=6")
    assert (found.admin.mode, found.media.allow, found.router.ratio) == (0o660, ("a", "b"), 6.0)


@pytest.mark.parametrize("toml, words", [
    ("[server]\nprot = 1", "unknown setting server.prot"), ("[sever]\nport = 1", "unknown section [sever]"),
    ("server = 1", "server must be a table"), ("[server]\nport = 'x'", "server.port is 'x'; a whole number expected"),
    ("[server]\nport = true", "server.port is True; a whole number expected"),
    ("[server]\nport = 1.5", "server.port is 1.5; a whole number expected"),
    ("[model]\npath = 1", "model.path is 1; text expected"),
    ("[media]\nallow = [1]", "media.allow is [1]; "), ("[server", "epdd.toml: "),
    ("[server]\nport = 70000", "server.port is 70000; at most 65535"),
    ("[router]\npolicy = 'x'", "router.policy is 'x'; allowed: budget, earliest"),
    ("[pd]\nthreads = -1", "pd.threads is -1; it must not be negative"),
    ("[pd]\nbatch_max = 0", "pd.batch_max must be at least 1")])
def test_bad_files_name_the_field(tmp_path, toml, words):
    file = tmp_path / "epdd.toml"
    file.write_text(toml)
    with pytest.raises(ConfigError, match=re.escape(words)):
        load("--config", str(file))


@pytest.mark.parametrize("argv, environ, words", [
    (["--config", "/nowhere.toml"], {}, "/nowhere.toml: No such file"),
    (["--set", "server.port=x"], {}, "--set: server.port is 'x'"), (["--set", "port=1"], {}, "--set: unknown section"),
    (["--port", "x"], {}, "--port: server.port is 'x'"), (["--wrong"], {}, "unrecognized arguments: --wrong"),
    ([], {"EPDD_SERVER_PORT": "x"}, "environment: server.port is 'x'"),
    ([], {"EPDD_SERVER_PROT": "1"}, "environment: unknown setting server.prot")])
def test_bad_arguments_and_environment_name_the_field(no_system_file, argv, environ, words):
    with pytest.raises(ConfigError, match=re.escape(words)):
        load(*argv, **environ)


def test_cache_alone_may_be_negative(no_system_file):
    assert load("--set", "arena.cache_bytes=-1").arena.cache_bytes == -1


@pytest.mark.parametrize("environ, folder", [
    ({"RUNTIME_DIRECTORY": "/run/epdd:/run/b", "XDG_RUNTIME_DIR": "/run/user/1"}, "/run/epdd"),
    ({"XDG_RUNTIME_DIR": "/run/user/1"}, "/run/user/1/epdd"), ({}, r"/tmp/epdd-\d+")])
def test_runtime_folder(environ, folder):
    assert re.fullmatch(folder, str(config.runtime_dir(environ)))


def test_admin_socket(monkeypatch):
    monkeypatch.setenv("RUNTIME_DIRECTORY", "/run/epdd")
    assert str(config.admin_socket(Config(), 80)) == "/run/epdd/admin-80.sock"
    assert str(config.admin_socket(Config().with_values("admin", {"socket": "/a"}, "test"), 80)) == "/a"
