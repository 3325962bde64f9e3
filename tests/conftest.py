"""Fixtures and settings of all tests."""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings

from tests import testbed

pytest_plugins = ["tests.databases"]

settings.register_profile(
    "netlimit",
    deadline=None,
    print_blob=True,  # what failed can be run again with @reproduce_failure
    derandomize=bool(os.environ.get("CI")),
    # Chance and the machine decide on these, not the code.
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
)
settings.load_profile("netlimit")
testbed.hurry()


@pytest.fixture(scope="session")
def root() -> None:
    """A test that needs root fails without it: one that is skipped proves nothing."""
    if os.geteuid() != 0:
        pytest.fail("This test makes network namespaces and puts rules into the kernel there: run it as root.")
