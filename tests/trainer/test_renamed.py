"""What an older version wrote is read as what it is called now, with one sentence that says what to write."""

import shutil

import pytest
import yaml

from rlframe.config import AlgorithmConfig, ConfigError
from trainer.run.config_changes import changes
from trainer.settings import compose as compose_module
from trainer.settings import renamed
from trainer.settings.compose import compose, load_yaml, resumed, to_yaml
from trainer.settings.presets import configs_dir


@pytest.fixture(autouse=True)
def forgotten_warnings(monkeypatch):
    """No sentence has been said yet, and three settings had other names."""
    renamed.warn.cache_clear()
    monkeypatch.setitem(renamed.RENAMED, "max_lag", "max_staleness")
    monkeypatch.setitem(renamed.RENAMED, "algorithm.temp", "rollout.temperature")
    monkeypatch.setitem(renamed.RENAMED, "actor.adapter", "actor.lora")


def said(capsys, *parts) -> None:
    """One line on stderr that has all of these, and nothing on stdout, where a configuration may be."""
    captured = capsys.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1, captured
    assert all(part in captured.err for part in parts), captured.err


@pytest.mark.parametrize(
    ("override", "now", "value"),
    [
        ("max_lag=1", "max_staleness", 1),
        ("algorithm.temp=0.5", "rollout.temperature", 0.5),
        ("actor.adapter.rank=8", "actor.lora.rank", 8),
    ],
)
def test_an_old_name_on_the_command_line_says_the_new_one_once(override, now, value, capsys):
    for _ in range(2):
        config = compose(["actor=lora", override])
    found = config
    for part in now.split("."):
        found = getattr(found, part)
    assert found == value
    said(capsys, f"{override.partition('=')[0]} is called {now} now", f"write {now}")


def test_a_config_of_a_run_with_old_names_is_read_and_written_with_the_new_ones(tmp_path, capsys):
    config = compose(["actor=lora", "max_staleness=1", "actor.lora.rank=8", "run_dir=runs/x"])
    tree = yaml.safe_load(to_yaml(config))
    tree["max_lag"] = tree.pop("max_staleness")
    tree["actor"]["adapter"] = tree["actor"].pop("lora")
    tree["algorithm"]["temp"] = tree["rollout"].pop("temperature")
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(tree))
    assert load_yaml(path) == config
    assert capsys.readouterr().err.count("is called") == 3
    assert load_yaml(path, ["max_lag=0"]).max_staleness == 0
    tree["max_staleness"] = 2
    path.write_text(yaml.safe_dump(tree))
    with pytest.raises(ConfigError, match=r"^max_lag and max_staleness are two names of one setting; leave out max_lag\.$"):
        load_yaml(path)


@pytest.mark.parametrize("text", ["0.5_5.0", "'0.5_5.0'", '"0.5_5"'])
def test_a_band_in_its_old_form_is_the_list_and_no_number(text, capsys):
    config = compose(["algorithm=bypass_pg_token_tis", f"algorithm.rollout_is_threshold={text}"])
    assert config.algorithm.rollout_is_threshold == [0.5, 5.0]
    said(capsys, "algorithm.rollout_is_threshold", "write algorithm.rollout_is_threshold=[0.5,5]")


@pytest.mark.parametrize("text", ["'0.5_5.0'", "0.5_5.0", "0.5_5"])
def test_the_config_of_an_older_run_has_the_same_band(text, tmp_path, capsys):
    """Without quotes YAML 1.1 reads 0.5_5 as the number 0.55."""
    config = compose(["algorithm=bypass_pg_token_icepop", f"run_dir={tmp_path}"])
    written = to_yaml(config)
    old = written.replace("rollout_is_threshold:\n  - 0.5\n  - 5.0\n", f"rollout_is_threshold: {text}\n")
    assert old != written
    (tmp_path / "config.yaml").write_text(old)
    again = resumed(tmp_path, [])
    assert again == config and changes(load_yaml(tmp_path / "config.yaml"), again) == []
    said(capsys, "rollout_is_threshold=0.5_5")
    assert to_yaml(again) == written


def test_the_library_reads_the_old_form_too():
    assert AlgorithmConfig(rollout_is_threshold="0.5_5.0") == AlgorithmConfig(rollout_is_threshold=[0.5, 5.0])


@pytest.fixture
def group_file(tmp_path, monkeypatch):
    """A copy of the groups, and a preset of the user's own among them, which the test writes."""
    shutil.copytree(configs_dir(), tmp_path / "configs")
    monkeypatch.setattr(compose_module, "configs_dir", lambda: tmp_path / "configs")
    return tmp_path / "configs" / "algorithm" / "mine.yaml"


def test_a_preset_with_an_unquoted_band_is_refused(group_file):
    group_file.write_text("rollout_is: token\nrollout_is_threshold: '0.5_5'\n")
    assert compose(["algorithm=mine"]).algorithm.rollout_is_threshold == [0.5, 5.0]
    group_file.write_text("rollout_is: token\nrollout_is_threshold: 0.5_5  # a band\n")
    with pytest.raises(ConfigError, match=r"mine\.yaml has rollout_is_threshold: 0\.5_5, .*; write .*: \[0\.5, 5\]\.$"):
        compose(["algorithm=mine"])


def test_a_preset_with_an_old_name_is_told_the_new_one(group_file):
    group_file.write_text("temp: 0.5\n")
    with pytest.raises(ConfigError, match=r"^algorithm\.temp is called rollout\.temperature now; write that\.$"):
        compose(["algorithm=mine"])
