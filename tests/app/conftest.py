"""Shared by the app's tests: the fake engine and a trace made by it."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from fake_engine import make_trace


@pytest.fixture(scope="session")
def trace():
    return make_trace("Why is the sky blue?", max_new_tokens=40)


@pytest.fixture(scope="session")
def hostile_trace():
    return make_trace("hostile tokens, please", max_new_tokens=30)
