"""Sessions on 1, 2 and 4 gloo ranks: `session_rank_checks` and `session_file_checks`, all of them run once, in one pool."""

from __future__ import annotations

import pytest

from tests.support.rank_pool import run_checks
from tests.support.session_cases import write_models
from tests.support.session_file_checks import PLAN as FILES
from tests.support.session_rank_checks import PLAN as RANKS

PLAN = [*RANKS, *FILES]
pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory) -> dict[tuple[str, int], str | None]:
    root = tmp_path_factory.mktemp("sessions")
    return run_checks(PLAN, write_models(root / "models"), root)


@pytest.mark.parametrize(("name", "ranks"), [(name, ranks) for name, ranks, _ in PLAN])
def test_on_ranks(outcomes, name: str, ranks: int) -> None:
    if (name, ranks) not in outcomes:
        pytest.fail("did not run, because an earlier check failed")
    assert outcomes[name, ranks] is None, outcomes[name, ranks]
