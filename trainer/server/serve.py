"""``rlframe serve``: starts the cluster's part and the HTTP server, and shuts both down with everything saved."""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from transformers import AutoTokenizer

from rlframe.backbone import Backbone
from rlframe.config import ConfigError
from rlframe.context_length import check_context, longest_context
from rlframe.models import resolve_model
from trainer.cluster.folders import check_run_dir
from trainer.cluster.head import RayHeadFailed
from trainer.cluster.placement import plan
from trainer.cluster.preflight import check_machine
from trainer.cluster.ray_cluster import reserve_pools, start_ray, stopping_ray
from trainer.run.failures import RunFailed
from trainer.server.app import make_app
from trainer.server.auth import read_keys
from trainer.server.data import Limits
from trainer.server.sampling import Sampling
from trainer.server.service import Service
from trainer.server.store import Store
from trainer.server.training import Training
from trainer.settings.checks import check
from trainer.settings.config import Config
from workers.engines.registry import check_serves_adapters
from workers.environments.stops import stop_token_ids
from workers.learner.session_rank import SessionGroup
from workers.pools import Pool
from workers.process import SIGNALS, interruptible
from workers.rollout.sampler import SamplerGroup
from workers.supervised import StartFailed, WorkerLost

GRACE_S = 5
"""How long clients that wait for an answer may delay the shutdown."""


@dataclass
class Base:
    """The base model, as far as the server itself needs it."""

    path: str
    tokenizer: Any
    vocabulary: int
    context: int
    eos: tuple[int, ...]

    @classmethod
    def read(cls, config: Config) -> Base:
        """Find the model, and see whether ranks can share it, or raise ConfigError."""
        path = resolve_model(config.model)
        trust = config.model.trust_remote_code
        kernel = config.model.attn_implementation
        outline = Backbone.outline(path, trainable=False, attn_implementation=kernel, trust_remote_code=trust)
        model = outline.model.config.get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
        eos = stop_token_ids(tokenizer, config.task.stop, config.task.template_args)
        check_context(config.rollout.max_model_len, model)
        context = longest_context(model) or config.rollout.max_model_len
        return cls(path, tokenizer, int(model.vocab_size), context, eos)


def serve(config: Config) -> None:
    """Serve until SIGTERM or Ctrl-C.

    What blocks comes first, outside of an event loop, where a signal ends it at once.

    Raises:
        ConfigError: a setting is refused, the port is taken, or another server works in the run directory.
        KeyboardInterrupt: a signal came before the server was ready.
    """
    interruptible()
    check(config)
    check_serves_adapters(config)
    check_run_dir(config.run_dir)
    check_machine(config)
    run_dir = Path(config.run_dir).absolute()
    with _occupied(run_dir), _listening(config) as listener:
        base = Base.read(config)
        keys, own_key = read_keys(config.server.keys_file, run_dir)
        placement = plan(config)
        try:
            start_ray(placement)
            interruptible()
            pools = reserve_pools(placement, config.cluster.startup_timeout_s, print)
            asyncio.run(_serve(config, base, keys, own_key, run_dir, listener, pools))
        except SystemExit:  # of Ray's own handler of SIGTERM, while Ray starts
            raise KeyboardInterrupt from None
        except RayHeadFailed as error:
            raise RunFailed(str(error)) from None
        finally:
            interruptible()
            with stopping_ray():
                pass


@contextlib.contextmanager
def _occupied(run_dir: Path) -> Iterator[None]:
    """Keep other servers out of a run directory; the lock goes with the process, however it ends."""
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "server.lock").open("a") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise ConfigError(f"Another server works in {run_dir}; stop it, or choose another name=...") from None
        yield


@contextlib.contextmanager
def _listening(config: Config) -> Iterator[socket.socket]:
    """A bound socket: a port that is taken is found before anything starts."""
    host, port = config.server.host, config.server.port
    try:
        listener = socket.create_server((host, port))
    except OSError as error:
        raise ConfigError(f"server.host={host}, server.port={port} cannot be listened on: {error.strerror}.") from None
    with listener:
        yield listener


async def _serve(
    config: Config,
    base: Base,
    keys: Any,
    own_key: Path | None,
    run_dir: Path,
    listener: socket.socket,
    pools: dict[str, Pool],
) -> None:
    task, loop = asyncio.current_task(), asyncio.get_running_loop()
    assert task is not None
    for number in SIGNALS:  # until `_answer` takes over
        loop.add_signal_handler(number, task.cancel)
    try:
        logs = str(run_dir / "logs")
        group = SessionGroup.launch(config, base.path, logs, pools["learner"], critics=())
        samplers = SamplerGroup.launch(config, base.path, logs, pools["rollout"])
        try:
            async with asyncio.timeout(config.cluster.startup_timeout_s):
                await asyncio.gather(group.start(), samplers.start())
        except (StartFailed, WorkerLost) as error:
            raise RunFailed(str(error)) from None
        service = await make_service(config, base, keys, run_dir / "state", group, samplers)
        print(f"serving {config.model.name} at http://{config.server.host}:{listener.getsockname()[1]}", flush=True)
        if own_key:
            print(f"the API key is in {own_key}", flush=True)
        await _answer(config, service, listener)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(asyncio.gather(group.close(), samplers.close()), 20)
    except asyncio.CancelledError:
        raise KeyboardInterrupt from None


async def make_service(
    config: Config, base: Base, keys: Any, folder: Path, group: SessionGroup, samplers: SamplerGroup
) -> Service:
    """The service over started groups; ``folder`` is where it keeps what is saved."""
    store = Store(folder)
    limits = Limits(base.vocabulary, base.context)
    training = Training(config, group, store, limits, await group.linear_modules())
    room = Limits(base.vocabulary, min(config.rollout.max_model_len, base.context))
    sampling = Sampling(samplers, room, base.tokenizer, base.eos)
    return Service(config, keys, store, training, sampling, samplers, tokenizer_path=base.path)


class _Server(uvicorn.Server):
    """Leaves signal handling to `_answer`."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


async def _answer(config: Config, service: Service, listener: socket.socket) -> None:
    """Answer requests until a signal comes, then save everything."""
    stop, loop = asyncio.Event(), asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, stop.set)
    app = make_app(service, config.server.max_request_mb * 2**20)
    server = _Server(
        uvicorn.Config(app, log_level="warning", access_log=False, lifespan="off", timeout_graceful_shutdown=GRACE_S)
    )
    service.start()
    answering = asyncio.create_task(server.serve(sockets=[listener]))
    await stop.wait()
    print("stopping: saving all models", flush=True)
    await service.stop()
    server.should_exit = True
    await answering
