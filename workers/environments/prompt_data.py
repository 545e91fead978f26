"""Reading rows of a prompt file (jsonl, parquet). What a row means is the business of `workers.environments.prompt_file`."""

from __future__ import annotations

import difflib
import json
from pathlib import Path
from typing import Any

from rlframe.config import ConfigError

PARQUET_MAGIC = b"PAR1"


def read_rows(key: str, name: str, kind: str) -> list[tuple[int, dict[str, Any]]]:
    """All rows of a file with their numbers, counted from 1.

    Args:
        key: the setting that names the file, for messages.
        name: path of the file.
        kind: ``jsonl`` or ``parquet``.

    Raises:
        ConfigError: no such file, not of that kind, a bad line (with its number), or no rows.
    """
    path = Path(name).expanduser()
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        looked = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
        raise ConfigError(f"{key}={name} {what}{looked}; give a file of prompts.")
    rows = _parquet(key, path) if kind == "parquet" else _jsonl(key, path)
    if not rows:
        raise ConfigError(f"{key}={name} has no prompts.")
    return rows


def place(name: str, kind: str, number: int) -> str:
    """``line 12 of prompts.jsonl``."""
    return f"{'row' if kind == 'parquet' else 'line'} {number} of {Path(name).name}"


def column(row: dict[str, Any], name: str, where: str, key: str) -> Any:
    """One value of a row.

    Raises:
        ConfigError: the row has no such column; names the nearest one and the setting ``key`` that chose the name.
    """
    if name in row:
        return row[name]
    near = difflib.get_close_matches(name, row, n=1, cutoff=0.0)
    hint = f"; did you mean {near[0]}? ({key})" if near else "; it is empty."
    raise ConfigError(f"{where} has no column {name}{hint}")


def _jsonl(key: str, path: Path) -> list[tuple[int, dict[str, Any]]]:
    data = path.read_bytes()
    if data.startswith(PARQUET_MAGIC):
        raise ConfigError(f"{key}={path} is a parquet file; choose task=parquet.")
    rows = []
    for number, line in enumerate(data.removeprefix(b"\xef\xbb\xbf").split(b"\n"), start=1):
        if not line.strip():
            continue
        where = place(str(path), "jsonl", number)
        try:
            row = json.loads(line.decode())
        except UnicodeDecodeError:
            raise ConfigError(f"{where} is not UTF-8 text.") from None
        except json.JSONDecodeError as error:
            raise ConfigError(f"{where} is not JSON: {error.msg} at column {error.colno}.") from None
        if not isinstance(row, dict):
            raise ConfigError(f'{where} is not a JSON object; write {{"prompt": ...}}, one a line.')
        rows.append((number, row))
    return rows


def _parquet(key: str, path: Path) -> list[tuple[int, dict[str, Any]]]:
    import pyarrow
    import pyarrow.parquet

    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise ConfigError(f"{key}={path} is not a parquet file: {str(error).splitlines()[0]}") from None
    return list(enumerate(table.to_pylist(), start=1))
