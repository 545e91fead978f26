"""``rlframe serve``: starts the cluster's part and the HTTP server, and takes both down again, everything saved."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
import uvicorn
from transformers import AutoConfig, AutoTokenizer

from rlframe.checks import check
from rlframe.config import Config, ConfigError
from rlframe.models import resolve_model
from trainer.cluster import reserve_pools, start_ray
from trainer.placement import plan
from trainer.server.app import make_app
from trainer.server.auth import read_keys
from trainer.server.data import Limits
from trainer.server.sampling import Sampling
from trainer.server.service import Service
from trainer.server.store import Store
from trainer.server.training import Training
from workers.rollout.sampler import SamplerGroup
from workers.session_rank import SessionGroup


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
        """Find the model, or raise ConfigError."""
        path = resolve_model(config.model)
        trust = config.model.trust_remote_code
        config_of_model = AutoConfig.from_pretrained(path, trust_remote_code=trust)
        if getattr(config_of_model, "quantization_config", None):
            raise ConfigError(f"{path} holds a quantised model, which cannot be trained; serve its full-precision version.")
        model = config_of_model.get_text_config()
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=trust)
        ends = model.eos_token_id if isinstance(model.eos_token_id, list) else [model.eos_token_id]
        eos = {token for token in (*ends, tokenizer.eos_token_id) if token is not None}
        context = int(getattr(model, "max_position_embeddings", None) or config.rollout.max_model_len)
        return cls(path, tokenizer, int(model.vocab_size), context, tuple(sorted(eos)))


def serve(config: Config) -> None:
    """Serve until SIGTERM or Ctrl-C.

    Raises:
        ConfigError: a setting is refused.
    """
    check(config)
    asyncio.run(_serve(config))


async def _serve(config: Config) -> None:
    base, run_dir = Base.read(config), Path(config.run_dir).absolute()
    keys, own_key = read_keys(config.server.keys_file, run_dir)
    placement = plan(config)
    start_ray(placement)
    try:
        pools = reserve_pools(placement, config.cluster.startup_timeout_s, print)
        logs = str(run_dir / "logs")
        group = SessionGroup.launch(config, base.path, logs, pools["learner"])
        samplers = SamplerGroup.launch(config, base.path, logs, pools["rollout"])
        await asyncio.wait_for(asyncio.gather(group.start(), samplers.start()), config.cluster.startup_timeout_s)
        service = await make_service(config, base, keys, run_dir / "state", group, samplers)
        await _listen(config, service, own_key)
        with contextlib.suppress(Exception):
            await asyncio.wait_for(asyncio.gather(group.close(), samplers.close()), 20)
    finally:
        ray.shutdown()


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


async def _listen(config: Config, service: Service, own_key: Path | None) -> None:
    app = make_app(service, config.server.max_request_mb * 2**20)
    server = uvicorn.Server(
        uvicorn.Config(
            app, host=config.server.host, port=config.server.port, log_level="warning", access_log=False, lifespan="off"
        )
    )
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    service.start()
    listening = asyncio.create_task(server._serve())
    while not server.started and not listening.done():
        await asyncio.sleep(0.01)
    if listening.done():
        raise ConfigError(f"server.port={config.server.port} on server.host={config.server.host} cannot be listened on.")
    port = server.servers[0].sockets[0].getsockname()[1]
    print(f"serving {config.model.name} at http://{config.server.host}:{port}", flush=True)
    if own_key:
        print(f"the API key is in {own_key}", flush=True)
    await stop.wait()
    print("stopping: saving all models", flush=True)
    await service.stop()
    server.should_exit = True
    await listening
