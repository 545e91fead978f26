"""Reading rows of a jsonl file. What a row means is decided in `workers.environments.prompt_file`; parquet is read by
`workers.environments.parquet`.

Rows are JSON-like whatever the file held, because they travel to reward processes as JSON. NaN and infinities stay; a whole
number with more digits than Python reads (4300) becomes the text of its digits.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection
from pathlib import Path
from typing import Any

from rlframe.config import ConfigError
from rlframe.config.validate import nearest

PARQUET_MAGIC = b"PAR1"
BOM = b"\xef\xbb\xbf"
MAX_DEPTH = 100
"""Deepest nesting of a row: more than data has, and less than pickle and JSON encoders take."""


class BadValue(ValueError):
    """A value that no row can hold; the message completes "line 3 of prompts.jsonl ... "."""


def read_rows(key: str, name: str, kind: str, texts: Collection[str] = ()) -> list[tuple[int, dict[str, Any]]]:
    """All rows of a file with their numbers, counted from 1.

    Args:
        key: the setting that names the file, for messages.
        name: path of the file.
        kind: ``jsonl`` or ``parquet``.
        texts: columns in which bytes of a parquet file are refused; elsewhere they become text by a rule.

    Raises:
        ConfigError: no such file, not of that kind, a bad line (with its number), or no rows.
    """
    path = Path(os.path.expanduser(name))
    if not path.is_file():
        what = "is a folder" if path.is_dir() else "does not exist"
        looked = "" if path.is_absolute() else f" (looked in {Path.cwd()})"
        raise ConfigError(f"{key}={name} {what}{looked}; give a file of prompts.")
    try:
        if kind == "parquet":
            from workers.environments.parquet import read_parquet  # pyarrow takes a while to import

            rows = read_parquet(key, path, texts)
        else:
            rows = _jsonl(key, path)
    except OSError as error:
        raise ConfigError(f"{key}={name} cannot be read: {error.strerror or error}.") from None
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
    near = nearest(name, row)
    hint = f"; did you mean {printable(near)}? ({key})" if near else "; it is empty."
    raise ConfigError(f"{where} has no column {name}{hint}")


def printable(text: str) -> str:
    """The text on one line, with escapes for what a terminal cannot show."""
    return text if text.isprintable() else text.encode("unicode_escape").decode()


def _jsonl(key: str, path: Path) -> list[tuple[int, dict[str, Any]]]:
    data = path.read_bytes()
    if data.startswith(PARQUET_MAGIC):
        raise ConfigError(f"{key}={path} is a parquet file; choose task=parquet.")
    rows = []
    for number, line in enumerate(data.split(b"\n"), start=1):
        line = line.removeprefix(BOM)  # the first line, or one where files were joined
        if line.strip():
            rows.append((number, _row(line, place(str(path), "jsonl", number))))
    return rows


def _row(line: bytes, where: str) -> dict[str, Any]:
    try:
        row = json.loads(line.decode(), parse_int=_whole, object_pairs_hook=_object)
        check_depth(row)
    except UnicodeDecodeError as error:
        raise ConfigError(f"{where} is not UTF-8 text (byte {error.start + 1} of the line).") from None
    except json.JSONDecodeError as error:
        raise ConfigError(f"{where} is not JSON: {error.msg} at column {error.colno}.") from None
    except RecursionError:
        raise ConfigError(f"{where} is nested deeper than {MAX_DEPTH} levels.") from None
    except BadValue as error:
        raise ConfigError(f"{where} {error}.") from None
    if not isinstance(row, dict):
        raise ConfigError(f'{where} is not a JSON object; write {{"prompt": ...}}, one a line.')
    return row


def _whole(digits: str) -> int | str:
    try:
        return int(digits)
    except ValueError:  # longer than `sys.get_int_max_str_digits`
        return digits


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in found if names.count(name) > 1)
        raise BadValue(f"has {printable(twice)} twice in one object")
    return found


def check_depth(value: Any, depth: int = 0) -> None:
    """Raises BadValue for a value that is nested deeper than `MAX_DEPTH`."""
    if isinstance(value, dict | list):
        if depth == MAX_DEPTH:
            raise BadValue(f"is nested deeper than {MAX_DEPTH} levels")
        for item in value.values() if isinstance(value, dict) else value:
            check_depth(item, depth + 1)
