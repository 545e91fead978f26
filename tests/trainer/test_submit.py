"""What is sent to a cluster, and what is refused before anything is sent. `test_cluster` sends it to a real one."""

import socket
import subprocess

import pytest
import yaml

from rlframe.config import ConfigError
from trainer.cli import main
from trainer.cluster.submit import Cluster, resuming, training
from trainer.settings.compose import compose, to_yaml
from trainer.settings.config import Config
from trainer.settings.redact import is_secret

RUN = "run_dir=/shared/runs/a"


def test_the_command_is_the_users_own_and_survives_the_shell():
    given = [RUN, "algorithm=sao", "task.options={a: 2, b: [$HOME, x]}", "name='two words; no shell'"]
    job = training(given, None, [])
    words = subprocess.run(["sh", "-c", f"set -- {job.entrypoint}; printf '%s\\n' \"$@\""], capture_output=True, text=True)
    assert words.stdout.splitlines() == ["exec", "rlframe", "train", *given]
    assert job.name == "two words; no shell"


def test_a_job_may_take_minutes_to_save_when_it_is_stopped_and_takes_no_secret_files_along():
    job = training([RUN], "/some/folder", ["A=1=2"])
    assert job.runtime_env["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "600", "A": "1=2"}
    assert job.runtime_env["working_dir"] == "/some/folder"
    assert {".env*", ".netrc", "*.pem", ".git", "runs"} <= set(job.runtime_env["excludes"])
    assert "working_dir" not in training([RUN], None, []).runtime_env


OWN = ["algorithm.policy_loss=no_such:Loss", "algorithm.advantage=no_such:A", "rollout.engine=no_such:E", "task.name=no_such:F"]


@pytest.mark.parametrize("given", OWN)
def test_a_module_that_only_the_cluster_has_is_not_asked_for_here(given, tmp_path):
    assert training([RUN, given], None, []).command == ("rlframe", "train", RUN, given)
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text(to_yaml(compose([f"run_dir={run}"])))
    assert resuming(str(run), [given], None, []).command == ("rlframe", "resume", str(run), given)
    with pytest.raises(ConfigError, match="steps=0 is out of range"):
        training([RUN, given, "steps=0"], None, [])


def test_nothing_of_the_local_environment_is_sent(monkeypatch, capsys):
    monkeypatch.setenv("WANDB_API_KEY", "0123456789abcdef")
    monkeypatch.setenv("RAY_AUTH_TOKEN", "fedcba9876543210")
    assert main.main(["submit", "--dry-run", RUN]) == 0
    shown = capsys.readouterr().out
    assert "0123456789abcdef" not in shown and "fedcba9876543210" not in shown
    assert yaml.safe_load(shown)["entrypoint"] == f"exec rlframe train {RUN}"


@pytest.mark.parametrize("name", ["WANDB_API_KEY", "HF_TOKEN", "AWS_SECRET_ACCESS_KEY", "DB_PASSWORD", "OPENAI_APIKEY"])
def test_a_variable_that_looks_like_a_secret_is_refused_without_its_value(name):
    with pytest.raises(ConfigError, match=f"^{name} looks like a secret") as caught:
        training([RUN], None, [f"{name}=hush"])
    assert "hush" not in str(caught.value)


@pytest.mark.parametrize("given", ["rollout.engine_args.api_key=hush", "rollout.engine_args={a: {api_key: hush}}"])
def test_a_setting_that_looks_like_a_secret_is_refused_too(given):
    with pytest.raises(ConfigError, match=r"^rollout\.engine_args\.(a\.)?api_key looks like a secret") as caught:
        training([RUN, given], None, [])
    assert "hush" not in str(caught.value)


def test_names_that_only_sound_like_secrets_are_settings():
    for name in ("actor.micro_batch_tokens", "rollout.max_new_tokens", "task.prompt_key"):
        assert not is_secret(name)


@pytest.mark.parametrize(
    ("argv", "sentence"),
    [
        (["submit", "algorithm=saoo", RUN], "algorithm=saoo is not an option"),
        (["submit", "steps=3"], "run_dir=runs/run would lie in the copy of the working directory"),
        (["submit", "--resume", "runs/run"], "run_dir=runs/run would lie in the copy of the working directory"),
        (["submit", "--resume", "/shared/runs/a", "stepz=3"], "stepz is not a setting; did you mean steps?"),
        (["submit", RUN, "--env", "oops"], "--env oops is not NAME=VALUE."),
        (["submit", RUN, "--address", "head:6379"], "--address head:6379 is not the address of a dashboard"),
        (["job", "list"], "--address  is not the address of a dashboard"),
    ],
)
def test_what_cannot_work_is_refused_before_anything_is_sent(argv, sentence, monkeypatch, capsys):
    monkeypatch.delenv("RAY_API_SERVER_ADDRESS", raising=False)
    assert main.main(argv) == 2
    assert capsys.readouterr().err.startswith(f"rlframe: {sentence}")


def test_a_run_that_is_visible_here_is_checked_with_its_own_settings(tmp_path):
    config = Config()
    config.name, config.algorithm.advantage, config.algorithm.rollouts_per_prompt = "mine", "group", 4
    config.model.builder = "tiny"
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert resuming(str(tmp_path), ["steps=7"], None, []).command == ("rlframe", "resume", str(tmp_path), "steps=7")
    assert resuming(str(tmp_path), [], None, []).name == "mine"
    with pytest.raises(ConfigError, match="rollouts_per_prompt"):
        resuming(str(tmp_path), ["algorithm.rollouts_per_prompt=1"], None, [])


def test_a_dashboard_that_is_not_there_is_one_sentence():
    with socket.socket() as taken:  # bound, and nobody listens
        taken.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(ConfigError, match=f"^No Ray dashboard answers at {address}"):
            Cluster(address)
