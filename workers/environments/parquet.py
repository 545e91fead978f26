"""Reading rows of a parquet file as JSON-like values.

| parquet | row |
|---|---|
| null, bool, integers, floats, text, lists, structs | as they are; text that is not UTF-8 with U+FFFD for its bad bytes |
| dates, times, timestamps (any unit) | text, as in ISO 8601, with all digits that there are |
| durations | whole numbers of their unit |
| decimals | text, exact |
| binary | base64 text |
| maps | lists of [key, value] |
| dictionaries, run-end encodings, unions, extension types | what they stand for, or are stored as |
"""

from __future__ import annotations

import base64
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pyarrow import types

from rlframe.config import ConfigError
from workers.environments.prompt_data import BadValue, check_depth, place, printable


def read_parquet(key: str, path: Path, texts: Collection[str]) -> list[tuple[int, dict[str, Any]]]:
    """All rows with their numbers, counted from 1.

    Args:
        key: the setting that names the file, for messages.
        path: the file.
        texts: columns that hold text, in which binary and what is not UTF-8 is refused.

    Raises:
        ConfigError: not a parquet file, two columns of one name, or a column that cannot be read.
    """
    try:
        with pq.ParquetFile(path) as file:
            table = file.read()
    except Exception as error:  # pyarrow raises many kinds for a damaged file
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ConfigError(f"{key}={path} is not a parquet file that can be read: {printable(reason)}.") from None
    twice = [name for name, count in Counter(table.column_names).items() if count > 1]
    if twice:
        raise ConfigError(f"{key}={path} has two columns named {printable(twice[0])}; rename one.")
    columns = {name: _values(table.column(name), name, path, name in texts) for name in table.column_names}
    return [(i + 1, {name: values[i] for name, values in columns.items()}) for i in range(table.num_rows)]


def _values(column: pa.ChunkedArray, name: str, path: Path, is_text: bool) -> list[Any]:
    try:
        if _is_plain(column.type):
            try:
                return list(column.to_pylist())
            except ValueError:  # text that is not UTF-8
                pass
        return [_value(scalar, is_text, place(path.name, "parquet", i + 1), name) for i, scalar in enumerate(column)]
    except ConfigError:
        raise
    except Exception as error:  # types that pyarrow cannot convert raise many kinds
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        kind = printable(str(column.type))
        raise ConfigError(
            f"The column {printable(name)} ({kind}) of {path.name} cannot be read: {printable(reason)}; leave it out."
        ) from None


def _value(scalar: pa.Scalar, is_text: bool, where: str, name: str) -> Any:
    try:
        value = json_like(scalar, is_text)
        check_depth(value)
    except BadValue as error:
        raise ConfigError(f"{where}, column {printable(name)}, {error}.") from None
    return value


def _is_plain(kind: pa.DataType) -> bool:
    """Whether pyarrow's own conversion gives JSON-like values."""
    if types.is_struct(kind):
        fields = [kind.field(i) for i in range(kind.num_fields)]
        return len({field.name for field in fields}) == len(fields) and all(_is_plain(field.type) for field in fields)
    if types.is_list(kind) or types.is_large_list(kind):
        return _is_plain(kind.value_type)
    text = types.is_string(kind) or types.is_large_string(kind)
    number = types.is_integer(kind) or types.is_floating(kind)
    return text or number or types.is_boolean(kind) or types.is_null(kind)


def json_like(scalar: pa.Scalar, is_text: bool) -> Any:
    """One value by the table of this module.

    Raises:
        BadValue: a struct has two fields of one name, or with ``is_text`` there is something that is no text.
    """
    if not scalar.is_valid:
        return None
    kind = scalar.type
    if types.is_struct(kind):
        names = [kind.field(i).name for i in range(kind.num_fields)]
        if len(set(names)) < len(names):
            raise BadValue("has two fields of one name")
        return {name: json_like(scalar[i], is_text) for i, name in enumerate(names)}
    if types.is_map(kind):
        return [[json_like(pair["key"], is_text), json_like(pair["value"], is_text)] for pair in scalar.values]
    if types.is_nested(kind) and not types.is_union(kind):
        return [json_like(item, is_text) for item in scalar.values]
    if (
        types.is_dictionary(kind)
        or types.is_run_end_encoded(kind)
        or types.is_union(kind)
        or isinstance(kind, pa.BaseExtensionType)
    ):
        return json_like(scalar.value, is_text)
    return _single(scalar, kind, is_text)


def _single(scalar: pa.Scalar, kind: pa.DataType, is_text: bool) -> Any:
    if types.is_string(kind) or types.is_large_string(kind) or types.is_string_view(kind):
        data = scalar.as_buffer().to_pybytes()
        try:
            return data.decode()
        except UnicodeDecodeError:
            if is_text:
                raise BadValue("is not UTF-8 text") from None
            return data.decode("utf-8", "replace")
    if types.is_decimal(kind):
        return str(scalar.as_py())
    if types.is_duration(kind):
        return scalar.value
    if types.is_interval(kind):
        return list(scalar.as_py())
    if types.is_temporal(kind):
        try:
            return scalar.cast(pa.string()).as_py()
        except pa.ArrowException:  # a time zone that this machine does not know
            return scalar.value
    value = scalar.as_py()
    if not isinstance(value, bytes):
        return value
    if is_text:
        raise BadValue("is binary; store it as text")
    return base64.b64encode(value).decode()
