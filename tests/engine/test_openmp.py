"""How llama.cpp's threads wait for each other, as OpenMP itself says it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from edgellm.engine.native import WAITING


def said(extra: dict[str, str]) -> str:
    """What GNU's OpenMP prints of its settings when it is loaded by us; and what we leave in the environment."""
    environment = {name: value for name, value in os.environ.items() if name not in WAITING}
    environment |= {"OMP_DISPLAY_ENV": "VERBOSE", **extra}
    code = "import edgellm.engine, os; print([n for n in ('OMP_WAIT_POLICY', 'GOMP_SPINCOUNT') if n in os.environ])"
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    if "GOMP_SPINCOUNT" not in done.stderr:
        pytest.skip("llama.cpp was not built with GNU's OpenMP")
    return done.stderr + done.stdout


def test_threads_that_wait_do_not_sleep_at_once() -> None:
    text = said({})
    assert "OMP_WAIT_POLICY = 'ACTIVE'" in text
    assert "GOMP_SPINCOUNT = '300000'" in text
    assert text.endswith("[]\n")  # nothing that other programs would inherit


def test_what_the_user_has_set_stays() -> None:
    text = said({"OMP_WAIT_POLICY": "passive"})
    assert "OMP_WAIT_POLICY = 'PASSIVE'" in text
    assert text.endswith("['OMP_WAIT_POLICY']\n")
