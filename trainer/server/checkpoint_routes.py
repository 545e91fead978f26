"""Routes about runs and what they saved: listing, looking at, deleting, copying."""

from __future__ import annotations

import shutil
from typing import Any

from fastapi import FastAPI

from trainer.server import paths, wire
from trainer.server.auth import User
from trainer.server.errors import UserError
from trainer.server.model_requests import expires_at
from trainer.server.paths import WeightsPath
from trainer.server.service import Service
from trainer.server.store import Checkpoint, ModelInfo, iso

MAX_PAGE = 1000


def checkpoint_routes(app: FastAPI, service: Service, api: str) -> None:
    """Add the routes to ``app`` under ``api``."""
    store = service.store

    @app.get(f"{api}/training_runs")
    async def training_runs(user: User, limit: int = 20, offset: int = 0) -> dict[str, Any]:
        runs = list(reversed(store.runs(user)))
        page = [_run(service, run) for run in _page(runs, limit, offset)]
        return {"training_runs": page, "cursor": {"offset": offset, "limit": limit, "total_count": len(runs)}}

    @app.get(f"{api}/training_runs/{{run_id}}")
    async def training_run(run_id: str, user: User) -> dict[str, Any]:
        return _run(service, store.run(run_id, user))

    @app.get(f"{api}/training_runs/{{run_id}}/checkpoints")
    async def checkpoints(run_id: str, user: User) -> dict[str, Any]:
        return {"checkpoints": [_checkpoint(found) for found in store.checkpoints(store.run(run_id, user))], "cursor": None}

    @app.get(f"{api}/checkpoints")
    async def all_checkpoints(user: User, limit: int = 100, offset: int = 0) -> dict[str, Any]:
        found = [checkpoint for run in store.runs(user) for checkpoint in store.checkpoints(run)]
        found.sort(key=lambda checkpoint: -checkpoint.created)
        cursor = {"offset": offset, "limit": limit, "total_count": len(found)}
        return {"checkpoints": [_checkpoint(one) for one in _page(found, limit, offset)], "cursor": cursor}

    @app.delete(f"{api}/training_runs/{{run_id}}/checkpoints/{{kind}}/{{name}}", status_code=204)
    async def delete_checkpoint(run_id: str, kind: str, name: str, user: User) -> None:
        await service.delete(_find(service, run_id, kind, name, user))

    @app.put(f"{api}/training_runs/{{run_id}}/checkpoints/{{kind}}/{{name}}/ttl", status_code=204)
    async def set_ttl(run_id: str, kind: str, name: str, body: wire.Ttl, user: User) -> None:
        checkpoint = _find(service, run_id, kind, name, user)
        checkpoint.expires = expires_at(body.ttl_seconds)
        store.update(checkpoint)

    @app.post(f"{api}/weights_info")
    async def weights_info(body: wire.TinkerPath, user: User) -> dict[str, Any]:
        info = store.find(paths.parse(body.tinker_path), user).model
        return {
            "base_model": info.base_model,
            "is_lora": True,
            "lora_rank": info.rank,
            "train_unembed": info.train_unembed and not service.training.tied,
            "train_mlp": info.train_mlp,
            "train_attn": info.train_attn,
        }

    @app.post(f"{api}/copy_weights")
    async def copy_weights(body: wire.CopyWeights, user: User) -> dict[str, str]:
        source_path = paths.parse(body.source_path)
        source = store.find(source_path, user)
        session = (
            service.clients.create(user, None, "copy")
            if body.session_id is None
            else service.clients.get(body.session_id, user)
        )
        run = ModelInfo(**{**vars(source.model), "id": f"{session.id}:train:{body.model_seq_id or 0}", "session": session.id})
        target = WeightsPath(run.id, source_path.kind, source_path.name)
        written = store.begin(target, overwrite=False)
        shutil.copytree(store.folder(source_path), written, dirs_exist_ok=True)
        store.save_run(run)
        store.commit(target, written, run, expires=expires_at(body.ttl_seconds), user_metadata=source.user_metadata)
        return {"tinker_path": str(target)}


def _find(service: Service, run_id: str, kind: str, name: str, user: str) -> Checkpoint:
    return service.store.find(paths.parse(f"{paths.SCHEME}{run_id}/{kind}/{name}"), user)


def _page(items: list[Any], limit: int, offset: int) -> list[Any]:
    if not 0 <= limit <= MAX_PAGE or offset < 0:
        raise UserError(f"limit={limit} or offset={offset} is out of range; limit is at most {MAX_PAGE}.")
    return items[offset : offset + limit]


def _run(service: Service, run: ModelInfo) -> dict[str, Any]:
    saved = service.store.checkpoints(run)
    newest = {kind: [c for c in saved if paths.parse(c.path).kind == kind][-1:] for kind in paths.KINDS}
    return {
        "training_run_id": run.id,
        "base_model": run.base_model,
        "model_owner": run.user,
        "is_lora": True,
        "lora_rank": run.rank,
        "last_request_time": iso(service.last_request(run)),
        "last_checkpoint": next(map(_checkpoint, newest["weights"]), None),
        "last_sampler_checkpoint": next(map(_checkpoint, newest["sampler_weights"]), None),
        "user_metadata": {str(k): str(v) for k, v in (run.user_metadata or {}).items()} or None,
    }


def _checkpoint(checkpoint: Checkpoint) -> dict[str, Any]:
    path = paths.parse(checkpoint.path)
    return {
        "checkpoint_id": path.checkpoint_id,
        "checkpoint_type": paths.KINDS[path.kind],
        "time": iso(checkpoint.created),
        "tinker_path": checkpoint.path,
        "size_bytes": checkpoint.size_bytes,
        "user_metadata": checkpoint.user_metadata,
        "expires_at": None if checkpoint.expires is None else iso(checkpoint.expires),
    }
