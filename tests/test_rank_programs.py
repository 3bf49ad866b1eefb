"""Random training programs over ranks: against one rank with the mean gradients, bit for bit."""

from __future__ import annotations

import pytest

from tests.rank_processes import run_ranks
from tests.rank_programs.draw import draw
from tests.rank_programs.run import run_all

FAST, SLOW = 25, 300


def check(seeds, limit_s):
    (found, *_) = run_ranks(4, lambda rank: run_all([draw(seed) for seed in seeds], rank), limit_s=limit_s)
    assert found is None, found[1]


def test_programs_end_as_on_one_rank(request):
    one = request.config.getoption("program")
    check(range(FAST) if one is None else [one], 120)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(FAST, SLOW, 55))
def test_many_programs_end_as_on_one_rank(first):
    check(range(first, min(first + 55, SLOW)), 280)
