"""Vocabulary-parallel and fully sharded losses on 2 and 4 gloo ranks; the checks are in `loss_rank_checks`."""

from __future__ import annotations

import pytest

from tests.support.loss_rank_checks import PLAN
from tests.support.rank_pool import run_checks

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes() -> dict[tuple[str, int], str | None]:
    return run_checks(PLAN)


@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name, ranks, _ in PLAN])
def test_on_ranks(outcomes, name: str, ranks: int) -> None:
    if (name, ranks) not in outcomes:
        pytest.fail("did not run, because an earlier check failed")
    assert outcomes[name, ranks] is None, outcomes[name, ranks]
