"""The routes. Each declares its request and its answer; `Service` and the modules that it uses do the work."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse

from trainer.server import wire
from trainer.server.auth import User
from trainer.server.checkpoint_routes import checkpoint_routes
from trainer.server.errors import UserError
from trainer.server.limits import BodyLimit
from trainer.server.service import Service

PROTOBUF = "application/x-protobuf"
API = "/api/v1"


def make_app(service: Service, max_body: int) -> FastAPI:
    """The application over a running service; ``max_body`` in bytes."""
    app = FastAPI(title="rlframe", docs_url=None, redoc_url=None, openapi_url=None)
    app.add_middleware(BodyLimit, max_body=max_body)
    app.add_exception_handler(UserError, _refuse)
    app.add_exception_handler(RequestValidationError, _refuse_body)

    app.state.service = service
    _health_routes(app, service)
    _session_routes(app, service)
    _training_routes(app, service)
    _sampling_routes(app, service)
    _future_routes(app, service)
    checkpoint_routes(app, service, API)
    return app


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, UserError)
    return JSONResponse({"error": str(error), "category": "user"}, status_code=error.status)


async def _refuse_body(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    first = error.errors()[0]
    field = ".".join(str(part) for part in first["loc"] if part != "body")
    return JSONResponse({"error": f"{field or 'The body'}: {first['msg']}.", "category": "user"}, status_code=422)


def _health_routes(app: FastAPI, service: Service) -> None:
    @app.get(f"{API}/healthz")
    async def health() -> dict[str, str]:
        return {"status": "ok"}

    @app.get(f"{API}/readyz")
    async def ready(response: Response) -> dict[str, str]:
        reason = await service.unready()
        response.status_code = 503 if reason else 200
        return {"status": reason or "ok"}


def _session_routes(app: FastAPI, service: Service) -> None:
    @app.post(f"{API}/client/config")
    async def client_config(user: User) -> dict[str, Any]:
        return {}

    @app.post(f"{API}/client/dynamic_config")
    async def client_dynamic_config(user: User) -> dict[str, Any]:
        return {"sample_cancel_enabled": True}

    @app.post(f"{API}/telemetry")
    async def telemetry(user: User) -> dict[str, str]:
        return {"status": "accepted"}

    @app.get(f"{API}/get_server_capabilities")
    async def capabilities(user: User) -> dict[str, Any]:
        return service.capabilities()

    @app.post(f"{API}/create_session")
    async def create_session(body: wire.CreateSession, user: User) -> dict[str, Any]:
        session = service.clients.create(user, body.user_metadata, body.display_name)
        return {"type": "create_session", "session_id": session.id}

    @app.post(f"{API}/session_heartbeat")
    async def heartbeat(body: wire.SessionId, user: User) -> dict[str, str]:
        service.clients.get(body.session_id, user)
        return {"type": "session_heartbeat"}

    @app.post(f"{API}/sessions/{{session_id}}/finish", status_code=204)
    async def finish(session_id: str, user: User) -> None:
        await service.finish(session_id, user)

    @app.get(f"{API}/sessions/{{session_id}}")
    async def get_session(session_id: str, user: User) -> dict[str, Any]:
        return service.describe_session(session_id, user)

    @app.get(f"{API}/sessions")
    async def list_sessions(user: User, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        ids = [session.id for session in reversed(service.clients.of(user))]
        return {"sessions": ids[offset : offset + limit]}


def _training_routes(app: FastAPI, service: Service) -> None:
    @app.post(f"{API}/create_model")
    async def create_model(body: wire.CreateModel, user: User) -> dict[str, Any]:
        return service.models.create_model(body, user)

    @app.post(f"{API}/get_info")
    async def get_info(body: wire.ModelId, user: User) -> dict[str, Any]:
        return service.models.info(body.model_id, user)

    @app.post(f"{API}/unload_model")
    async def unload_model(body: wire.ModelId, user: User) -> dict[str, Any]:
        return service.models.unload(body.model_id, user)

    @app.post(f"{API}/forward_backward")
    async def forward_backward(request: Request, user: User) -> dict[str, Any]:
        if request.headers.get("Content-Type") != PROTOBUF or request.headers.get("Content-Encoding"):
            raise UserError(f"forward_backward takes uncompressed {PROTOBUF}; use tinker 0.25 or newer.", status=415)
        return service.models.forward_backward(await request.body(), user)

    @app.post(f"{API}/optim_step")
    async def optim_step(body: wire.OptimStep, user: User) -> dict[str, Any]:
        return service.models.optim_step(body, user)

    @app.post(f"{API}/save_weights")
    async def save_weights(body: wire.SaveWeights, user: User) -> dict[str, Any]:
        return service.models.save_weights(body, user)

    @app.post(f"{API}/save_weights_for_sampler")
    async def save_weights_for_sampler(body: wire.SaveWeights, user: User) -> dict[str, Any]:
        return service.models.save_weights_for_sampler(body, user)

    @app.post(f"{API}/load_weights")
    async def load_weights(body: wire.LoadWeights, user: User) -> dict[str, Any]:
        return service.models.load_weights(body, user)


def _sampling_routes(app: FastAPI, service: Service) -> None:
    @app.post(f"{API}/create_sampling_session")
    async def create_sampling_session(body: wire.CreateSamplingSession, user: User) -> dict[str, Any]:
        return service.samples.create_sampling_session(body, user)

    @app.post(f"{API}/asample")
    async def asample(body: wire.SampleRequest, user: User) -> dict[str, Any]:
        return service.samples.sample(body, user)

    @app.get(f"{API}/samplers/{{sampler_id}}")
    async def get_sampler(sampler_id: str, user: User) -> dict[str, Any]:
        sampler = service.clients.sampler(sampler_id, user)
        return {"sampler_id": sampler.id, "base_model": sampler.base_model, "model_path": sampler.model_path}


def _future_routes(app: FastAPI, service: Service) -> None:
    @app.post(f"{API}/retrieve_future")
    async def retrieve_future(body: wire.RequestId, user: User) -> Response:
        future = await service.futures.wait(body.request_id, user)
        if future is None:
            # The SDK asks again at once after a 408, and says so in its log after a 200 of type try_again.
            pending = {"type": "try_again", "request_id": body.request_id, "queue_state": "active"}
            return JSONResponse(pending, status_code=408)
        if future.proto is not None:
            return Response(future.proto, media_type=PROTOBUF)
        return JSONResponse(future.json)

    @app.post(f"{API}/cancel_future", status_code=204)
    async def cancel_future(body: wire.RequestId, user: User) -> None:
        service.samples.cancel(body.request_id, user)
