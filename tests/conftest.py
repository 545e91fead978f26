"""Order of the test files: those with slow tests first, so that of two processes none is left alone with them at the end."""

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    slow: dict[object, int] = {}
    for item in items:
        slow[item.path] = slow.get(item.path, 0) + (item.get_closest_marker("slow") is not None)
    items.sort(key=lambda item: -slow[item.path] if slow[item.path] else 0)
