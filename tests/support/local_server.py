"""A whole server in one process: ranks and samplers behind `local_ray`, uvicorn in a thread."""

import asyncio
import threading
from pathlib import Path

import tinker
import uvicorn

from tests.support.local_ray import Actor, kill, put
from trainer.server.app import make_app
from trainer.server.auth import Keys
from trainer.server.serve import Base, make_service
from trainer.settings.checks import check
from trainer.settings.compose import compose
from workers.learner.session_rank import SessionGroup, SessionRank
from workers.rollout.sampler import SamplerGroup, SamplerWorker

ALICE, BOB = "tml-alice-000000", "tml-bob-00000000"
BASE = "tiny"
PATIENCE_S = 600
"""For a server on a machine that does much else."""


class LocalRank(SessionRank):
    """One rank without a process group, so that several servers can live in one process."""

    def address(self):
        return ""

    def join(self, address):
        self.mesh = None

    def close(self):
        pass


class LocalGroup(SessionGroup):
    def put(self, batch):
        return put(batch)


class LocalServer:
    """Serves until `stop`; ``folder`` is where it keeps its state, so that another one can continue from it."""

    def __init__(self, folder: Path, *overrides: str, port: int = 0):
        settings = [f"run_dir={folder}", "rollout=torch", "server.port=0", "log.wandb=disabled", *overrides]
        self.config = compose(settings)
        check(self.config)
        self.folder, self.port = folder, port
        self._started = threading.Event()
        self._failure = None
        self._thread = threading.Thread(target=lambda: asyncio.run(self._run()), daemon=True)
        self._thread.start()
        if not self._started.wait(PATIENCE_S):
            raise TimeoutError(f"the server did not start within {PATIENCE_S} s")
        if self._failure:
            raise self._failure

    async def _run(self):
        try:
            await self._serve()
        except BaseException as error:
            self._failure = error
            self._started.set()
            raise

    async def _serve(self):
        self.base = Base.read(self.config)
        rank = Actor(LocalRank, self.config, self.base.path, 0, None, threaded=True)
        self.rank, self.samplers = rank.instance, []
        group, samplers = LocalGroup([rank]), SamplerGroup(self.config, self._spawn, kill=kill)
        await asyncio.gather(group._all("start", ""), samplers.start())
        keys = Keys({ALICE: "alice", BOB: "bob"})
        self.service = await make_service(self.config, self.base, keys, self.folder / "state", group, samplers)
        app = make_app(self.service, self.config.server.max_request_mb * 2**20)
        self.loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self.service.start()
        http = uvicorn.Server(uvicorn.Config(app, port=self.port, log_level="warning", access_log=False, lifespan="off"))
        listening = asyncio.create_task(http.serve())  # uvicorn leaves signals alone outside of the main thread
        while not http.started:
            await asyncio.sleep(0.01)
        self.port = http.servers[0].sockets[0].getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._started.set()
        await self._stop.wait()
        await self.service.stop()
        http.should_exit = True
        await listening
        await asyncio.gather(group.close(), samplers.close())

    def _spawn(self, index):
        actor = Actor(SamplerWorker, self.config, self.base.path, index, None)
        self.samplers.append(actor.instance)
        return actor

    def client(self, key: str = ALICE, **options) -> tinker.ServiceClient:
        return tinker.ServiceClient(base_url=self.url, api_key=key, **options)

    def rest(self, key: str = ALICE) -> tinker.RestClient:
        return tinker.RestClient(base_url=self.url, api_key=key)

    def run(self, coroutine):
        """Run something on the server's loop."""
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(PATIENCE_S)

    def session(self, client: tinker.TrainingClient):
        """The session that a training client drives."""
        return self.rank.backbone.sessions[client.model_id]

    def stop(self):
        self.loop.call_soon_threadsafe(self._stop.set)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive(), "the server did not stop"
