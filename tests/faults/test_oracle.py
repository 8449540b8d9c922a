"""A short run of the oracle; `python -m tests.faults.oracle` is the long one."""

from tests.faults.oracle import run, table


async def test_mixed_requests_at_once_and_beside_deaths_are_those_of_runs_alone() -> None:
    tallies = await run(num_answers=400, at_once=100, num_distinct=64, seed=3, pause_s=1.0)
    assert all(tally.is_good for tally in tallies), table(tallies)
    assert tallies[1].kills, "nothing was killed"
