"""Processes that all tests of this folder share."""

import pytest
from support.ranks import Processes


@pytest.fixture(scope="session")
def processes():
    """Four of them, of which a test may take fewer."""
    started = Processes(4)
    yield started
    started.close()
