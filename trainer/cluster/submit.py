"""Jobs on a running cluster, through Ray's Job API: sending one, following it, asking about it, stopping it.

The cluster runs `rlframe train` or `rlframe resume` on its head, with a copy of the working directory. The configuration is
checked here, before anything is sent; modules that it names are not imported, since only the cluster or the working directory
may have them, and are checked there. Ray keeps what is sent (command, environment variables, metadata) in plain text and
shows it to everyone who reaches the dashboard, so nothing that looks like a secret is sent: secrets belong in the environment
of ``ray start`` (or of the pod), which the job inherits, or into a file such as ``~/.netrc`` there.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import re
import shlex
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobStatus, JobSubmissionClient

from rlframe.config import ConfigError
from trainer.cluster.folders import lost_run_dir
from trainer.settings.compose import compose, load_yaml, resumed, to_yaml
from trainer.settings.config import Config
from trainer.settings.redact import redact_text, secret_names
from workers.process import refuse_shadowing

T = TypeVar("T")

STOP_WAIT_S = 600
"""How long a stopped job may take to finish its step and save, before Ray kills it; Ray's own limit is 3 seconds."""
EXCLUDES = (".git", ".venv*", ".env*", ".netrc", "*.pem", "*.key", "id_rsa*", "runs", "wandb", "__pycache__")
"""Never part of the working directory that is sent, besides what .gitignore names."""


@dataclass(frozen=True)
class Job:
    """What is sent."""

    command: tuple[str, ...]
    """The command line that runs on the cluster."""
    working_dir: str | None
    """Local folder whose copy the command runs in; None: wherever Ray runs on the head."""
    env: dict[str, str]
    """Environment variables of the command and its workers; no secrets."""
    name: str
    """Name of the run, shown by the dashboard."""

    @property
    def entrypoint(self) -> str:
        """The command as the cluster's shell gets it; ``exec``, so that signals reach it."""
        return "exec " + shlex.join(self.command)

    @property
    def runtime_env(self) -> dict[str, Any]:
        """Ray's description of the working directory and the variables."""
        env: dict[str, Any] = {"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": str(STOP_WAIT_S), **self.env}}
        if self.working_dir is not None:
            env |= {"working_dir": self.working_dir, "excludes": list(EXCLUDES)}
        return env


def training(overrides: Sequence[str], working_dir: str | None, env: Sequence[str]) -> Job:
    """A job that trains from the first step.

    Args:
        overrides: settings, as for ``rlframe train``.
        working_dir: see `Job`.
        env: variables, ``NAME=VALUE`` each.

    Raises:
        ConfigError: a setting is refused, the run directory would be lost, or something looks like a secret.
    """
    _refuse_shadowing(working_dir)
    config = compose(overrides, elsewhere=True)
    _refuse_secrets(dataclasses.asdict(config))
    _check_run_dir(config.run_dir)
    return Job(("rlframe", "train", *overrides), working_dir, _variables(env), config.name)


def resuming(run: str, overrides: Sequence[str], working_dir: str | None, env: Sequence[str]) -> Job:
    """A job that resumes the run in ``run``, a path on the cluster; see `training`."""
    _refuse_shadowing(working_dir)
    _check_run_dir(run)
    config = _resumed(Path(run), overrides)
    _refuse_secrets(dataclasses.asdict(config))
    if not (Path(run) / "config.yaml").exists():
        return Job(("rlframe", "resume", run, *overrides), working_dir, _variables(env), Path(run).name)
    return Job(("rlframe", "resume", run, *overrides), working_dir, _variables(env), config.name)


def _resumed(run: Path, overrides: Sequence[str]) -> Config:
    """The configuration of the run, if its directory is visible here too; if not, the defaults with the overrides."""
    if (run / "config.yaml").exists():
        return resumed(run, overrides, elsewhere=True)
    with tempfile.TemporaryDirectory() as folder:
        defaults = Path(folder) / "config.yaml"
        defaults.write_text(to_yaml(Config()), "utf-8")
        return load_yaml(defaults, overrides)


def _check_run_dir(run_dir: str) -> None:
    if not os.path.isabs(run_dir):
        raise ConfigError(lost_run_dir(run_dir))


def _refuse_shadowing(working_dir: str | None) -> None:
    if working_dir is not None:
        refuse_shadowing(working_dir)


def _refuse_secrets(tree: Mapping[str, Any]) -> None:
    for name in secret_names(tree):
        raise ConfigError(
            f"{name} looks like a secret, and Ray stores and shows what a job is given; set it where `ray start` runs "
            "(the job inherits that environment) or in a file on the cluster, such as ~/.netrc for wandb."
        )


def _variables(assignments: Sequence[str]) -> dict[str, str]:
    for text in assignments:
        if not re.match(r"[A-Za-z_]\w*=", text):
            raise ConfigError(f"--env {text.partition('=')[0]} is not NAME=VALUE.")
    variables = dict(text.split("=", 1) for text in assignments)
    _refuse_secrets(variables)
    return variables


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable for a while."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        os.environ.pop(name)
        if before is not None:
            os.environ[name] = before


class Cluster:
    """The Job API of one cluster; token authentication is Ray's own (RAY_AUTH_MODE and RAY_AUTH_TOKEN or its file).

    Args:
        address: the dashboard, ``http://HOST:8265``; None: RAY_API_SERVER_ADDRESS.

    Raises:
        ConfigError: no address, no answer there, or it refuses us.
    """

    def __init__(self, address: str | None) -> None:
        address = address or os.environ.get("RAY_API_SERVER_ADDRESS")
        if not address or not address.startswith(("http://", "https://")):
            raise ConfigError(
                f"--address {address or ''} is not the address of a dashboard; give --address http://HEAD:8265, "
                "or set RAY_API_SERVER_ADDRESS."
            )
        self.address = address
        headers = json.loads(os.environ.get("RAY_JOB_HEADERS", "{}"))  # as `ray job` reads it, for proxies
        with self._answers(), _variable("RAY_API_SERVER_ADDRESS", address):  # Ray lets the variable win over the argument
            self.client = JobSubmissionClient(address, headers=headers)

    @property
    def ray_version(self) -> str:
        """Version of Ray on the cluster."""
        return str(self.client._server_ray_version)  # the public get_version() is the version of the API

    def submit(self, job: Job, job_id: str | None = None) -> str:
        """Send a job; returns its id.

        Raises:
            ConfigError: the working directory is too large, the id is taken, or the cluster refuses the job.
        """
        with self._answers():
            return self.client.submit_job(
                entrypoint=job.entrypoint,
                runtime_env=job.runtime_env,
                metadata={"job_name": job.name},
                submission_id=job_id,
            )

    def status(self, job_id: str) -> tuple[JobStatus, str]:
        """Status of a job, and what Ray says about it in one line."""
        with self._answers(job_id):
            info = self.client.get_job_info(job_id)
        return info.status, redact_text(info.message.splitlines()[0]) if info.message else ""

    def logs(self, job_id: str) -> str:
        """What the job has printed so far."""
        with self._answers(job_id):
            return str(self.client.get_job_logs(job_id))

    def follow(self, job_id: str, write: Callable[[str], None]) -> JobStatus:
        """Write what the job prints, from its start, until it ends; returns how it ended."""

        async def tail() -> None:
            async for text in self.client.tail_job_logs(job_id):
                write(text)

        with self._answers(job_id):
            asyncio.run(tail())
        return self.status(job_id)[0]

    def stop(self, job_id: str) -> bool:
        """Ask a job to finish its step, save and end; False if it has ended already."""
        with self._answers(job_id):
            return bool(self.client.stop_job(job_id))

    def list(self) -> list[tuple[str, JobStatus, str]]:
        """Id, status and command of all jobs, newest first."""
        with self._answers():
            jobs = [job for job in self.client.list_jobs() if job.submission_id]
        jobs.sort(key=lambda job: job.start_time or 0, reverse=True)
        return [(job.submission_id or "", job.status, redact_text(job.entrypoint.removeprefix("exec "))) for job in jobs]

    @contextmanager
    def _answers(self, job_id: str | None = None) -> Iterator[None]:
        """Turn what Ray's client raises into one sentence."""
        try:
            yield
        except AuthenticationError:
            raise ConfigError(
                f"The cluster at {self.address} wants a token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN or "
                "RAY_AUTH_TOKEN_PATH to the one that it was started with."
            ) from None
        except (ConnectionError, requests.RequestException):
            raise ConfigError(f"No Ray dashboard answers at {self.address}; is the address right, and the head up?") from None
        except (RuntimeError, ValueError) as error:
            text = str(error)
            if "status code 404" in text and job_id is not None:
                raise ConfigError(
                    f"The cluster at {self.address} has no job {job_id}; `rlframe job list` names them."
                ) from None
            lines = [line for line in text.splitlines() if line.strip(" .")]
            raise ConfigError(f"The cluster at {self.address} refused: {lines[-1] if lines else text}") from None
