"""No change makes the project larger than `tools/budget.toml` allows; one that makes it smaller lowers the limit."""

from tools.budget import limits, measured, runs


def test_nothing_has_grown_and_limits_follow_what_has_shrunk() -> None:
    found = measured()
    assert {name: count for name, count in found.items() if count > limits()[name][0]} == {}
    assert {name: limits()[name][0] for name, count in found.items() if limits()[name][0] > _slack(count)} == {}


def test_a_question_runs_no_more_files_than_before() -> None:
    found = runs()
    assert {name: count for name, count in found.items() if count > limits()[name][0]} == {}
    assert found.keys() | measured().keys() == limits().keys()


def _slack(count: int) -> int:
    """Return how large the limit of a figure may be: a few lines more than what is there, so that not each of several
    changes under way has to change it."""
    return count + max(1, count // 100)
