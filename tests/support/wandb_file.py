"""Reads a ``.wandb`` file: wandb's own messages in LevelDB's log format (wandb 0.31 has no reader in Python any more).

A file is a 7-byte header, then blocks of 32 KiB; a record is checksum (4 bytes), length (2), type (1: whole, 2: first,
3: middle, 4: last) and payload; a rest of a block shorter than a record's header is padding.
"""

import json
import struct
from collections.abc import Iterator
from pathlib import Path

from wandb.proto import wandb_internal_pb2

BLOCK, HEADER, HEAD = 32768, 7, 7


def records(path: Path) -> Iterator[wandb_internal_pb2.Record]:
    data, position, payload = path.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B"
    while position + HEAD <= len(data):
        left = BLOCK - position % BLOCK
        if left < HEAD:
            position += left
            continue
        _, length, kind = struct.unpack_from("<IHB", data, position)
        payload += data[position + HEAD : position + HEAD + length]
        position += HEAD + length
        if kind in (1, 4):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(payload)
            payload = b""
            yield record


def _items(items) -> dict:
    found: dict = {}
    for item in items:
        *outer, last = item.nested_key or [item.key]
        place = found
        for name in outer:
            place = place.setdefault(name, {})
        place[last] = json.loads(item.value_json)
    return found


class WandbFile:
    """What one attempt has left for ``wandb sync``."""

    def __init__(self, path: Path) -> None:
        self.config, self.rows, self.summary, self.id, self.text = {}, [], {}, None, path.read_bytes()
        self.arguments, self.exit_code = [], None
        for record in records(path):
            match record.WhichOneof("record_type"):
                case "run":
                    self.id = record.run.run_id
                    self.config |= _items(record.run.config.update)
                case "config":
                    self.config |= _items(record.config.update)
                case "history":
                    self.rows.append(_items(record.history.item))
                case "summary":
                    self.summary |= _items(record.summary.update)
                case "environment":
                    self.arguments += record.environment.args
                case "exit":
                    self.exit_code = record.exit.exit_code

    @property
    def steps(self) -> list[int]:
        return [row["_step"] for row in self.rows]


def wandb_files(run_dir: Path) -> list[WandbFile]:
    """All attempts of a run, oldest first."""
    paths = sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"), key=lambda path: path.stat().st_mtime_ns)
    return [WandbFile(path) for path in paths]
