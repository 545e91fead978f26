"""What is a secret, by its name or its form, and that none is written to a run directory, to wandb or to the report."""

import dataclasses
import json
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlframe.config import ConfigError
from trainer.cli import main
from trainer.cluster.submit import Cluster, training
from trainer.run.config_changes import changes
from trainer.settings.compose import compose, load_yaml, resumed, to_yaml
from trainer.settings.overrides import settings as keys
from trainer.settings.redact import HIDDEN, is_secret, redact_text, secret_names, without_secrets

SECRETS = str.split(
    """secret_key auth_key WANDB_API_KEY hf_token AWS_SECRET_ACCESS_KEY private_key api_key apiKey apikey OPENAI_APIKEY
    judge-api-key token key HF_TOKEN AWS_SESSION_TOKEN AWS_ACCESS_KEY_ID authToken access_token refresh_token db_password
    dbPassword DB_PASSWD passphrase credential credentials client_secret clientSecretValue secret Authorization auth
    basic_auth auth_header bearer api_keys access_keys auth_tokens ssh_key encryption_key RAY_AUTH_TOKEN api_key_2
    my_password_1 wandbkey_secret hftoken"""
)
HARMLESS = str.split(
    """max_new_tokens keys_file tokenizer micro_batch_tokens stop_token_ids top_k monkey monkeys turkey keyboard tokens
    rollouts_tokens prompt_key answer_key sort_key primary_key public_key tools_key eos_token bos_token pad_token
    image_token loss_per_token num_tokens token_ids token_count author authors authority auth_mode RAY_AUTH_MODE
    RAY_AUTH_TOKEN_PATH password_file secretary api_version api_server_address api_base max_token key_file kv_cache_dtype
    tokenize detokenize monkey_patch stop_keys passes compass_path apis keynote secretion"""
)
PLANTED = "planted-7Jq2"
NESTING = st.recursive(
    st.just(PLANTED),
    lambda inner: (
        st.dictionaries(st.sampled_from(HARMLESS), inner, min_size=1, max_size=3) | st.lists(inner, min_size=1, max_size=2)
    ),
    max_leaves=6,
)


ENVIRONMENT = """
from dataclasses import replace

from workers.environments.arithmetic import Arithmetic


class Judged(Arithmetic):
    def __init__(self, task, tokenizer, **kwargs):
        assert {"nested", "auth_key", "url"} == set(task.options)
        super().__init__(replace(task, options={}), tokenizer, **kwargs)
"""
"""A task with options that hold secrets."""


@pytest.mark.parametrize("name", SECRETS)
def test_names_of_secrets(name):
    assert is_secret(name) and is_secret(f"rollout.engine_args.{name}") and is_secret(f"{name}.inner")
    assert list(secret_names({"a": {name: PLANTED}})) == [f"a.{name}"]
    assert redact_text(f"x.{name}={PLANTED} steps=3") == f"x.{name}={HIDDEN} steps=3"
    assert redact_text(f"{{'{name}': '{PLANTED}', 'n': 1}}") == f"{{'{name}': {HIDDEN}, 'n': 1}}"
    with pytest.raises(ConfigError, match=r"looks like a secret") as caught:
        training(["run_dir=/shared/a", f"rollout.engine_args={{{name}: {PLANTED}}}"], None, [])
    assert PLANTED not in str(caught.value)
    if name.isidentifier():
        with pytest.raises(ConfigError, match=f"^{name} looks like a secret"):
            training(["run_dir=/shared/a"], None, [f"{name}={PLANTED}"])


@pytest.mark.parametrize("name", HARMLESS)
def test_names_that_only_sound_like_them(name):
    assert not is_secret(name)
    assert without_secrets({name: "x", "inner": {name: [1, "y"]}}) == {name: "x", "inner": {name: [1, "y"]}}
    assert redact_text(f"{name}=value {name}: value") == f"{name}=value {name}: value"


def test_no_setting_of_ours_is_taken_for_a_secret():
    assert not [key for key in keys() if is_secret(key)]
    tree = dataclasses.asdict(compose())
    assert without_secrets(tree) == tree


@given(
    st.sampled_from(SECRETS),
    NESTING,
    st.lists(st.sampled_from(HARMLESS), max_size=4),
    st.sampled_from(["upper", "lower", "title"]),
)
def test_below_the_name_of_a_secret_nothing_is_shown_however_deep_it_lies(name, below, above, case):
    name = getattr(name, case)() if "_" in name else name
    tree = {name: below, "steps": 3}
    for outer in above:
        tree = {outer: [tree], "lr": 0.1}
    hidden = without_secrets(tree)
    assert PLANTED not in json.dumps(hidden) and json.dumps(hidden).count(HIDDEN) == 1
    assert without_secrets(hidden) == hidden and len(list(secret_names(tree))) == 1


@given(NESTING)
def test_where_no_name_is_one_of_a_secret_everything_stays(tree):
    assert without_secrets(tree) == tree and not (isinstance(tree, dict | list) and list(secret_names(tree)))


@given(st.text("abcXYZ019._~!$&'()*+,;=:@%-", min_size=1), st.sampled_from(["http", "https", "postgresql+psycopg", "s3"]))
def test_logins_of_addresses_are_hidden_whatever_the_password(password, scheme):
    assert redact_text(f"see {scheme}://user:{password}@host:80/x") == f"see {scheme}://{HIDDEN}@host:80/x"


@pytest.mark.parametrize("name", ["api_key", "token", "sig_secret"])
def test_secrets_in_the_query_of_an_address_are_hidden(name):
    for address in (f"http://host:30000/?{name}=", f"https://host/x?a=1&{name}=", f"url=http://host/?{name}="):
        assert redact_text(f"no answer from {address}{PLANTED}") == f"no answer from {address}{HIDDEN}"
    assert list(secret_names({"rollout": {"server_urls": [f"http://h/?{name}={PLANTED}"]}})) == ["rollout.server_urls.0"]


def test_well_known_forms_are_hidden_and_text_that_is_like_them_is_not():
    for value in (
        "hf_" + "a1B2" * 8, "sk-proj-" + "a1B2" * 8, "ghp_" + "a1B2" * 9, "glpat-" + "a1B2" * 5, "AKIA" + "A1B2" * 4,
        "Bearer abcdef123456", "Basic dXNlcjpwYXNz=", "eyJhbGciOi1.eyJzdWIiOi2.c2ln3", "tml-" + "a1B2" * 8,
        "-----BEGIN RSA PRIVATE KEY-----\nabc\n-----END RSA PRIVATE KEY-----",
    ):  # fmt: skip
        assert redact_text(f"uses {value}.") in (f"uses {HIDDEN}.", f"uses {HIDDEN}"), value
    for plain in (
        "hf_transfer_is_enabled_here", "sk-learn-like-classifier", "https://host/path", "a bearer of news",
        "token: 151936 is beyond",
        "task.reward=mod:fn", "rollout.temperature=0.5_5", "key 3", "basic tokenizer", "use_auth_token=true", "api_key=null",
    ):  # fmt: skip
        assert redact_text(plain) == plain


def test_a_secret_is_not_saved_and_has_to_be_given_again(tmp_path):
    given = [f"rollout.engine_args.hf_token={PLANTED}", "rollout.engine_args.seed_of_kv=3"]
    config = compose(given)
    (tmp_path / "config.yaml").write_text(to_yaml(config))
    assert PLANTED not in (tmp_path / "config.yaml").read_text()
    with pytest.raises(ConfigError, match=r"^rollout\.engine_args\.hf_token holds a secret, which .* give it again"):
        resumed(tmp_path, [])
    again = resumed(tmp_path, given[:1])
    assert again.rollout.engine_args == {"hf_token": PLANTED, "seed_of_kv": 3}
    assert changes(load_yaml(tmp_path / "config.yaml"), again) == []
    assert PLANTED not in str(
        changes(load_yaml(tmp_path / "config.yaml"), resumed(tmp_path, [*given[:1], "rollout.engine_args.n=1"]))
    )


def test_a_refusal_does_not_repeat_a_secret(capsys):
    assert main.main(["train", f"rollout.engine_args.api_key={PLANTED}", f"steps=token={PLANTED}"]) == 2
    assert main.main(["train", "--dry-run", "model.path=/none", f"task.optons.api_key={PLANTED}"]) == 2
    assert main.main(["train", f"model.path=https://me:{PLANTED}@host/model"]) == 2
    assert PLANTED not in "".join(capsys.readouterr())


@pytest.mark.slow
def test_a_planted_secret_is_nowhere_in_a_run_directory_wandbs_files_or_the_report(tmp_path):
    """A whole run, in a process of its own, so that everything it prints is looked at as well."""
    (tmp_path / "judged.py").write_text(ENVIRONMENT)
    command = [
        "train", "model.build.warmup_steps=0", "rollout=torch", "steps=2", "batch_size=8", "eval.size=8", "run_dir=run",
        "log.wandb=offline", "checkpoint.every=1", "log.rollouts_every=1", "task.name=judged:Judged",
        f"task.options={{nested: {{secret_key: {PLANTED}}}, auth_key: {PLANTED}}}",
        f"task.options.url=https://me:{PLANTED}@judge/v1",
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    binary = [sys.executable, "-m", "trainer.cli.main"]
    done = subprocess.run(
        [*binary, *command], cwd=tmp_path, capture_output=True, text=True, timeout=800, env=environment, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = subprocess.run(
        [*binary, "report", "run"], cwd=tmp_path, capture_output=True, text=True, env=environment, check=True
    )
    assert PLANTED not in done.stdout + done.stderr + report.stdout
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    names = {path.name for path in files}
    assert {"config.yaml", "report.html", "metrics.jsonl", "controller.log"} <= names and any(
        n.endswith(".wandb") for n in names
    )
    assert any("checkpoints" in path.parts for path in files)
    assert [str(path) for path in files if PLANTED.encode() in path.read_bytes()] == []
    assert HIDDEN in (tmp_path / "run" / "config.yaml").read_text() and HIDDEN in (tmp_path / "run" / "report.html").read_text()


def test_listings_of_jobs_hide_what_others_have_sent(monkeypatch):
    job = SimpleNamespace(
        submission_id="j1", status="RUNNING", start_time=1, message=f"token={PLANTED}",
        entrypoint=f"exec rlframe train rollout.engine_args.api_key={PLANTED} steps=3",
    )  # fmt: skip
    cluster = Cluster.__new__(Cluster)
    cluster.address = "http://head:8265"
    cluster.client = SimpleNamespace(list_jobs=lambda: [job], get_job_info=lambda job_id: job)
    assert cluster.list() == [("j1", "RUNNING", f"rlframe train rollout.engine_args.api_key={HIDDEN} steps=3")]
    assert cluster.status("j1") == ("RUNNING", f"token={HIDDEN}")
