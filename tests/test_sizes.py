"""Files and functions stay short enough to read: 450 lines of a file, 65 of a function."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = [path for folder in ("rlframe", "workers", "trainer", "tests") for path in sorted((ROOT / folder).rglob("*.py"))]
LONG_FILE, LONG_FUNCTION = 450, 65


def long_functions(text: str) -> list[str]:
    """Name and lines of every function, decorators left out, that is longer than `LONG_FUNCTION`."""
    functions = [node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)]
    lengths = [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in functions]
    return [f"{name}: {lines} lines" for name, lines in lengths if lines > LONG_FUNCTION]


def test_functions_are_measured_from_their_def_to_their_last_line():
    body = "    pass\n" * (LONG_FUNCTION - 1)
    assert long_functions(f"@cache\nasync def f():\n{body}") == []
    assert long_functions(f"def g():\n{body}    pass\n") == [f"g: {LONG_FUNCTION + 1} lines"]


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_and_its_functions_are_short(path):
    text = path.read_text("utf-8")
    assert len(text.splitlines()) <= LONG_FILE and not long_functions(text)
