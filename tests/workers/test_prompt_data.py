"""Files of prompts as they come: whatever is in them becomes JSON-like rows, or one sentence that says where it is."""

import base64
import datetime
import decimal
import json
import math

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlframe.config import ConfigError
from tests.support.chatml import chatml_tokenizer
from workers.environments.prompt_data import read_rows
from workers.environments.registry import make_environment
from workers.environments.settings import TaskConfig

TOKENIZER = chatml_tokenizer()
EXAMPLES = 150


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data")
    (folder / "data_rewards.py").write_text("def zero(response, row):\n    return 0\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(folder))
        patch.setattr("workers.environments.prompt_file.check_reward", lambda task: False)  # a process for every example
        yield folder


def problems(path, kind="jsonl", **task):
    config = TaskConfig(name=kind, train=str(path), eval=str(path), reward="data_rewards:zero", **task)
    return make_environment(config, TOKENIZER, seed=0, eval_size=None).train_prompts()


def jsonl(folder, data, **task):
    path = folder / "p.jsonl"
    path.write_bytes(data if isinstance(data, bytes) else data.encode())
    return [p.payload["row"] for p in problems(path, **task)]


def parquet(folder, columns, **task):
    path = folder / "p.parquet"
    pq.write_table(pa.table(columns), path)
    return [p.payload["row"] for p in problems(path, "parquet", **task)]


GOOD = '{"prompt": "a"}\n'


@pytest.mark.parametrize(
    ("data", "sentence"),
    [
        (GOOD + '{"prompt": "a\\ud800"}', r"^line 2 of p\.jsonl: the prompt is not Unicode text: .*\(\\ud800\)"),
        (GOOD + '{"prompt": [{"role": "user", "content": "\\udfff"}]}', r"^line 2 of p\.jsonl: the prompt is not Unicode text"),
        (GOOD.encode() + b'{"prompt": "\xff"}', r"^line 2 of p\.jsonl is not UTF-8 text \(byte 13 of the line\)"),
        (GOOD.encode("utf-16"), r"^line 1 of p\.jsonl is not UTF-8 text"),
        (GOOD + '\n\n{"prompt": "a", "prompt": "b"}', r"^line 4 of p\.jsonl has prompt twice"),
        (GOOD + '{"x": {"\\ud800": 1, "\\ud800": 2}}', r"^line 2 of p\.jsonl has \\ud800 twice"),
        (
            GOOD + '{"prompt": "a", "x": ' + "[" * 10**5 + "]" * 10**5 + "}",
            r"^line 2 of p\.jsonl is nested deeper than 100 levels",
        ),
        (GOOD + '{"prompt": "a", "x": ' + "[" * 200 + "]" * 200 + "}", r"^line 2 of p\.jsonl is nested deeper than 100 levels"),
        (GOOD + '{"prompt": null}', r"^line 2 of p\.jsonl: the prompt is empty"),
        (GOOD + '{"prompt": []}', r"^line 2 of p\.jsonl: the prompt is empty"),
        (GOOD + '{"prompt": NaN}', r"^line 2 of p\.jsonl: the prompt is neither a string nor"),
        (GOOD + '{"prompt": [{"role": null, "content": "a"}]}', r"^line 2 of p\.jsonl: the prompt is neither a string nor"),
        (GOOD + '{"prompt": "a" "b"}', r"^line 2 of p\.jsonl is not JSON: .*at column 16"),
        (GOOD + '{"\\ud800": 1}', r"^line 2 of p\.jsonl has no column prompt; did you mean \\ud800\?"),
        ("\n \n", "has no prompts"),
    ],
)
def test_a_line_that_cannot_be_used_is_one_sentence(folder, data, sentence):
    with pytest.raises(ConfigError, match=sentence) as caught:
        jsonl(folder, data)
    assert str(caught.value).isprintable()


def test_what_a_line_may_hold_besides(folder):
    digits = "7" * 5000
    odd = f'{{"prompt": "a", "big": {digits}, "small": -{digits}, "nan": NaN, "inf": -Infinity, "half": "\\ud800", "x": 1e999}}'
    rows = jsonl(folder, f"\ufeff\n\ufeff{GOOD}\r\n\t\n\ufeff{odd}\r\n")
    assert rows[0] == {"prompt": "a"} and (rows[1]["big"], rows[1]["small"]) == (digits, f"-{digits}")
    assert math.isnan(rows[1]["nan"]) and rows[1]["inf"] == -math.inf and rows[1]["half"] == "\ud800"
    assert [number for number, _ in read_rows("task.train", str(folder / "p.jsonl"), "jsonl")] == [2, 5]


def test_columns_of_a_parquet_file_become_json_like_by_the_stated_rule(folder):
    moment = 1_700_000_000_123_456_789
    text = datetime.datetime.fromtimestamp(moment // 10**9, datetime.UTC).strftime("%Y-%m-%d %H:%M:%S") + ".123456789"
    columns = {
        "prompt": pa.array(["a", "b"]),
        "ns": pa.array([moment, None], pa.timestamp("ns")),
        "zoned": pa.array([moment, None], pa.timestamp("ns", "UTC")),
        "nested": pa.array([{"when": [moment]}, None], pa.struct([("when", pa.list_(pa.timestamp("ns")))])),
        "day": pa.array([datetime.date(2024, 2, 29), None]),
        "clock": pa.array([1, None], pa.time64("ns")),
        "far": pa.array([2**31 - 1, None], pa.date32()),
        "lasts": pa.array([5, None], pa.duration("ns")),
        "price": pa.array([decimal.Decimal("12345678901234567890.10"), None]),
        "picture": pa.array([b"\x00\xff", None]),
        "map": pa.array([[("k", 1)], None], pa.map_(pa.string(), pa.int64())),
        "kind": pa.array(["x", None]).dictionary_encode(),
        "half": pa.array([1.5, None], pa.float16()),
        "large": pa.array([2**64 - 1, None], pa.uint64()),
        "bad": pa.StringArray.from_buffers(2, pa.array([0, 2, 2], pa.int32()).buffers()[1], pa.py_buffer(b"\xffz")),
    }
    first, second = parquet(folder, columns)
    assert first.pop("far") and second.pop("far") is None, "a year that Python has no date for"
    assert first == {
        "prompt": "a",
        "ns": text,
        "zoned": text + "Z",
        "nested": {"when": [text]},
        "day": "2024-02-29",
        "clock": "00:00:00.000000001",
        "lasts": 5,
        "price": "12345678901234567890.10",
        "picture": base64.b64encode(b"\x00\xff").decode(),
        "map": [["k", 1]],
        "kind": "x",
        "half": 1.5,
        "large": 2**64 - 1,
        "bad": "\ufffdz",
    }
    assert set(second.pop("bad") + second.pop("prompt")) == {"b"} and set(second.values()) == {None}


@pytest.mark.parametrize(
    ("columns", "sentence"),
    [
        ({"prompt": pa.array(["a", None])}, r"^row 2 of p\.parquet: the prompt is empty"),
        ({"prompt": pa.array([1, 2])}, r"^row 1 of p\.parquet: the prompt is neither a string nor"),
        ({"prompt": pa.array([[], []], pa.list_(pa.string()))}, r"^row 1 of p\.parquet: the prompt is empty"),
        ({"promt": pa.array(["a"])}, r"^row 1 of p\.parquet has no column prompt; did you mean promt"),
        ({"prompt": pa.array([], pa.string())}, "has no prompts"),
    ],
)
def test_a_row_that_cannot_be_used_is_one_sentence(folder, columns, sentence):
    with pytest.raises(ConfigError, match=sentence):
        parquet(folder, columns)


def test_a_prompt_of_bytes_is_a_sentence_and_not_a_prompt(folder):
    with pytest.raises(ConfigError, match=r"^row 2 of p\.parquet, column prompt, is not UTF-8 text"):
        parquet(
            folder,
            {"prompt": pa.StringArray.from_buffers(2, pa.array([0, 1, 2], pa.int32()).buffers()[1], pa.py_buffer(b"a\xff"))},
        )
    with pytest.raises(ConfigError, match=r"^row 1 of p\.parquet, column prompt, is binary; store it as text"):
        parquet(folder, {"prompt": pa.array([b"a"])})


def test_a_column_of_another_name_is_named(folder):
    with pytest.raises(ConfigError, match=r"^line 1 of p\.jsonl, column question: the prompt is empty"):
        jsonl(folder, '{"question": ""}', prompt_key="question")


def test_columns_of_one_name_are_refused(folder):
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    pq.write_table(table, folder / "twice.parquet")
    with pytest.raises(ConfigError, match=r"two columns named prompt"):
        problems(folder / "twice.parquet", "parquet")


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
PROMPTS = st.text(max_size=5) | st.lists(
    st.fixed_dictionaries(
        {}, optional={"role": st.sampled_from(["user", "assistant", 3]), "content": VALUES, "tool_calls": VALUES}
    ),
    max_size=3,
)
ROWS = st.fixed_dictionaries({}, optional={"prompt": PROMPTS | VALUES, "tools": VALUES, "x": VALUES})
LINES = st.one_of(
    ROWS.map(lambda row: json.dumps(row).encode()),
    ROWS.map(lambda row: json.dumps(row, ensure_ascii=False).encode("utf-8", "surrogatepass")),
    VALUES.map(lambda value: json.dumps({"prompt": json.dumps(value)}).encode()),
    st.binary(max_size=20),
    st.text(st.sampled_from('{}[]":,\\u0d8prompt '), max_size=30).map(str.encode),
)
TYPES = st.recursive(
    st.sampled_from(
        [pa.null(), pa.bool_(), pa.int8(), pa.uint64(), pa.float16(), pa.float64(), pa.string(), pa.large_string(), pa.binary()]
        + [pa.binary(3), pa.date32(), pa.date64(), pa.decimal128(10, 2), pa.decimal256(50, 3), pa.time32("ms"), pa.time64("ns")]
        + [pa.timestamp(unit) for unit in ("s", "ms", "us", "ns")]
        + [pa.timestamp("ns", "Europe/Berlin"), pa.timestamp("us", "+07:00"), pa.duration("us"), pa.duration("ns")]
        + [pa.dictionary(pa.int32(), pa.string()), pa.uuid(), pa.json_(pa.string()), pa.string_view(), pa.binary_view()]
    ),
    lambda inner: (
        st.builds(pa.list_, inner)
        | st.builds(pa.large_list, inner)
        | st.builds(lambda kind: pa.map_(pa.string(), kind), inner)
        | st.builds(lambda a, b: pa.struct([("role", a), ("content", b)]), inner, inner)
    ),
    max_leaves=3,
)


def same_or_a_sentence(read):
    """Problems whose payload JSON can carry, or one line."""
    try:
        found = read()
    except ConfigError as error:
        assert str(error).isprintable()
    else:
        json.loads(json.dumps(found))


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(LINES, max_size=4), st.sampled_from([None, True, False]), st.sampled_from(["refuse", "drop", "continue"]))
def test_any_jsonl_file_gives_problems_or_one_sentence(folder, lines, chat_template, last_assistant):
    data = b"\n".join(lines)
    same_or_a_sentence(lambda: jsonl(folder, data, chat_template=chat_template, last_assistant=last_assistant))


@settings(max_examples=EXAMPLES, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(["prompt", "tools", "x"]), TYPES), min_size=1, max_size=3), st.data())
def test_any_parquet_file_gives_problems_or_one_sentence(folder, kinds, data):
    columns = {}
    for name, kind in dict(kinds).items():
        seed = data.draw(st.integers(0, 2**20))
        columns[name] = random_array(kind, seed)
    columns.setdefault("prompt", pa.array(["a", "b"]))
    try:
        pq.write_table(pa.table(columns), folder / "p.parquet")
    except pa.ArrowException:
        return  # a type that parquet does not have
    same_or_a_sentence(lambda: [p.payload["row"] for p in problems(folder / "p.parquet", "parquet")])


def random_array(kind, seed):
    """Two values of a type: of arrow's own choice where it can cast to it, else nulls."""
    import random

    rng = random.Random(seed)
    for values in ([rng.randint(-(2**62), 2**62), None], [rng.randint(0, 100), rng.randint(0, 86)], [rng.random(), 0.5]):
        for source in (pa.array(values), pa.array([str(v) for v in values])):
            try:
                return source.cast(kind)
            except (pa.ArrowException, TypeError):
                continue
    if pa.types.is_struct(kind):
        parts = [random_array(kind.field(i).type, seed + i) for i in range(kind.num_fields)]
        return pa.StructArray.from_arrays(parts, fields=list(kind))
    if pa.types.is_map(kind):
        return pa.MapArray.from_arrays(
            pa.array([0, 1, 2], pa.int32()), pa.array(["a", "b"]), random_array(kind.item_type, seed), kind
        )
    if pa.types.is_list(kind) or pa.types.is_large_list(kind):
        build = pa.ListArray if pa.types.is_list(kind) else pa.LargeListArray
        offset = pa.int32() if pa.types.is_list(kind) else pa.int64()
        return build.from_arrays(pa.array([0, 1, 2], offset), random_array(kind.value_type, seed))
    return pa.nulls(2, kind)
