"""The arguments that an engine's package declares, read from its source: importing it would take as long as starting it."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Any

PLAIN: dict[str, tuple[type, ...]] = {
    "int": (int,),
    "float": (int, float),
    "str": (str,),
    "bool": (bool,),
    "None": (type(None),),
    **dict.fromkeys(("list", "List", "set", "tuple"), (list,)),
    **dict.fromkeys(("dict", "Dict"), (dict,)),
}
"""Names in annotations -> what a value from YAML may be."""


def declared(package: str, file: str, classes: tuple[str, ...]) -> dict[str, str] | None:
    """Name -> annotation of every argument; None where the package is not installed here, or declares them otherwise.

    Args:
        package: the engine's.
        file: path of a source file in it.
        classes: dataclasses in that file whose fields are the arguments.
    """
    if (spec := find_spec(package)) is None:
        return None
    for folder in spec.submodule_search_locations or ():
        if (path := Path(folder) / file).is_file():
            return fields_of(path.read_text("utf-8"), classes)
    return None


def fields_of(source: str, classes: tuple[str, ...]) -> dict[str, str] | None:
    """Name -> annotation of the public fields of these classes; None where there are none."""
    found = {
        line.target.id: ast.unparse(line.annotation)
        for node in ast.parse(source).body
        if isinstance(node, ast.ClassDef) and node.name in classes
        for line in node.body
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name) and not line.target.id.startswith("_")
    }
    return found or None


def fits(value: Any, annotation: str) -> bool:
    """Whether a value from YAML can be of the annotated type; types that are the engine's own are taken to fit."""
    return _fits(value, ast.parse(annotation, mode="eval").body)


def _fits(value: Any, node: ast.expr) -> bool:
    if isinstance(node, ast.BinOp):
        return _fits(value, node.left) or _fits(value, node.right)
    if isinstance(node, ast.Constant):
        return value is None if node.value is None else not isinstance(node.value, str) or fits(value, node.value)
    name = ast.unparse(node.value if isinstance(node, ast.Subscript) else node).removeprefix("typing.")
    inside = node.slice if isinstance(node, ast.Subscript) else None
    parts = inside.elts if isinstance(inside, ast.Tuple) else [inside] if inside is not None else []
    if name == "Literal":
        return value in [part.value for part in parts if isinstance(part, ast.Constant)]
    if name in ("Optional", "Union"):
        return (name == "Optional" and value is None) or any(_fits(value, part) for part in parts)
    if name not in PLAIN:
        return True
    if isinstance(value, bool):
        return name == "bool"
    if not isinstance(value, PLAIN[name]):
        return False
    return not isinstance(value, list) or not parts or all(any(_fits(x, part) for part in parts) for x in value)
