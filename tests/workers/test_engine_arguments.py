"""What an engine declares is read from its source, and a value of another type is found before the engine starts."""

import dataclasses
from importlib.util import find_spec
from typing import Any, Literal, Optional, Union  # noqa: F401 (the annotations below are evaluated)

import pytest
from pydantic import ConfigDict, TypeAdapter, ValidationError

from workers.engines.arguments import declared, fields_of, fits
from workers.engines.registry import engine_spec

VALUES = [None, True, False, 0, 1, -3, 0.5, 1.0, "", "a", "1", [], [1], ["a"], [1, "a"], [0.5], {}, {"a": 1}]
"""What YAML can give."""


@pytest.mark.parametrize(
    "annotation",
    [
        "int",
        "float",
        "str",
        "bool",
        "int | None",
        "float | None",
        "bool | str | None",
        "Optional[int]",
        "Optional[str]",
        "Union[int, str]",
        "Union[float, None]",
        "list[int]",
        "list[str] | None",
        "list[int | str] | None",
        "list[float]",
        "dict[str, Any]",
        "dict[str, Any] | None",
        "str | list[str] | None",
        "str | dict[str, Any]",
        "Literal['a', 'b']",
        "Literal['a', 'b'] | None",
        "Optional[Literal['1', 'x']]",
        "Any",
    ],
)
@pytest.mark.parametrize("quoted", [False, True])
def test_a_value_fits_where_pydantic_takes_it(annotation, quoted):
    strict = TypeAdapter(eval(annotation), config=ConfigDict(strict=True))
    for value in VALUES:
        try:
            strict.validate_python(value)
            wanted = True
        except ValidationError:
            wanted = False
        assert fits(value, repr(annotation) if quoted else annotation) == wanted, (annotation, value)


@pytest.mark.parametrize("annotation", ["CompilationConfig", "str | list[type[Processor]]", "ModelDType", "'Own | None'"])
def test_types_that_only_the_engine_knows_are_left_to_it(annotation):
    assert fits("a", annotation)


def test_a_set_is_a_list_in_yaml():
    assert fits(["a"], "set[str]") and not fits("a", "set[str]") and not fits([1], "set[str]")


SOURCE = """
@dataclass
class EngineArgs:
    plain: int = 3
    "docstring"
    either: Optional[str] = None
    _hidden: int = 0
    constant = 5
    def method(self):
        local: int = 0

@dataclass
class AsyncEngineArgs(EngineArgs):
    more: bool = False

class Other:
    foreign: int = 0
"""


def test_fields_are_those_of_the_named_classes():
    assert fields_of(SOURCE, ("EngineArgs", "AsyncEngineArgs")) == {"plain": "int", "either": "Optional[str]", "more": "bool"}
    assert fields_of(SOURCE, ("Missing",)) is None


def test_an_engine_that_is_not_here_or_declares_nothing_there_is_not_judged():
    assert engine_spec("torch").arguments() is None
    assert declared("no_such_engine", "engine.py", ("EngineArgs",)) is None
    assert declared("json", "nowhere.py", ("EngineArgs",)) is None
    assert declared("json", "decoder.py", ("EngineArgs",)) is None


@pytest.mark.slow
@pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM is not installed")
def test_what_is_read_is_what_vllm_takes():
    """The dataclass itself names its fields and defaults; every default that YAML can give fits its annotation."""
    from vllm import AsyncEngineArgs

    found = engine_spec("vllm").arguments()
    fields = {field.name: field for field in dataclasses.fields(AsyncEngineArgs) if not field.name.startswith("_")}
    assert set(found) == set(fields)
    for name, field in fields.items():
        if isinstance(field.default, bool | int | float | str):
            assert fits(field.default, found[name]), (name, field.default, found[name])
