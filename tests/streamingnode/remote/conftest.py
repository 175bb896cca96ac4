"""A node, served to whoever connects."""

from collections.abc import AsyncIterator

import pytest

from tests.streamingnode.remote.nodes import Served, node_behind_proxy
from tests.streamingnode.remote.session_cases import serves

IDS = [2**31, 2**31 - 1, 2**53 + 1, 2**63 - 1, 2**63, 2**64 - 1]


@pytest.fixture
async def served() -> AsyncIterator[Served]:
    """A node that serves, and does so still when the test has ended, with nothing left of its
    clients.
    """
    async with node_behind_proxy() as served:
        yield served
        await served.all_gone()
        await serves(served)
        await served.all_gone()
