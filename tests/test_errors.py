"""Errors keep what they say, in another process, too."""

from __future__ import annotations

import pickle

import pytest

from edgellm.errors import DeviceLost, EdgeError, InvalidOption, ProfileStopped


@pytest.mark.parametrize(
    "error",
    [
        DeviceLost("The connection to desk is lost.", "Start it again."),
        InvalidOption("--budget is 2.", "Give a share from 0 to 1."),
        ProfileStopped("Stopped.", "Run it again.", 3, 9, kept=True),
    ],
    ids=lambda error: type(error).__name__,
)
def test_an_error_is_the_same_where_another_process_raises_it(error: EdgeError) -> None:
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error)
    assert (str(again), again.__dict__) == (str(error), error.__dict__)
