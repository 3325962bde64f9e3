"""A lab a module, with a controller in its gateway."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from scripts.testbed.namespaces import Lab

pytest.register_assert_rewrite("tests.e2e.gateway")

from tests.e2e.gateway import Gateway  # noqa: E402  it says what was marked when it should not be


@pytest.fixture(scope="module")
def lab(root: None, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """A module that wants address translation says so: NAT = True."""
    with Lab(nat=getattr(request.module, "NAT", False)) as lab:
        yield lab


@pytest.fixture(scope="module")
def controller(lab: Lab, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Iterator[Gateway]:
    """A controller that runs. A module names what no rule may touch: SAFE = (…); one that breaks things over and over
    says that this is no fight to back off from: PERSISTENT = True."""
    gateway = Gateway(lab, tmp_path_factory.mktemp("gateway"), getattr(request.module, "SAFE", ()))
    gateway.start(*(("-m", "tests.e2e.persistent") if getattr(request.module, "PERSISTENT", False) else ()))
    yield gateway
    gateway.close()


@pytest.fixture
def gateway(controller: Gateway) -> Iterator[Gateway]:
    """The same, and no rule is left afterwards."""
    yield controller
    controller.clear()
