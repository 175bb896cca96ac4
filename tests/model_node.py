"""A node for step-by-step tests: opened, used, crashed and reopened from plain synchronous code.

A crash copies the directory as it is at that moment, closes the node that had it, and goes on with
the copy: what a process killed at that moment would have left to the next one.
"""

import asyncio
import shutil
from collections.abc import Coroutine
from pathlib import Path
from typing import TypeVar

from streamingnode.config import load_config
from streamingnode.node import Node
from streamingnode.opening import open_node
from tests.copying import copy_at_rest

T = TypeVar("T")


class ModelNode:
    """One node directory and the loop its node lives on."""

    def __init__(self, root: Path, **settings: object) -> None:
        self._root = root
        self._config = load_config(arguments=settings)
        self._runner = asyncio.Runner()
        self._generation = 0
        self._life: asyncio.Task[None] | None = None
        self.open()

    @property
    def path(self) -> Path:
        """The directory of the present generation."""
        return self._root / f"node-{self._generation}"

    def run(self, work: Coroutine[object, object, T]) -> T:
        """Run a call of the node to its end."""
        return self._runner.run(work)

    def open(self) -> None:
        """Open the directory."""
        self._runner.run(self._start())

    def close(self) -> None:
        """Close the node in order."""
        self._runner.run(self._stop())

    def reopen(self) -> None:
        """Close in order and open again."""
        self.close()
        self.open()

    def crash(self) -> None:
        """Go on with what the directory holds now."""
        copy_at_rest(self.path, self._root / f"node-{self._generation + 1}")
        self.close()
        shutil.rmtree(self.path)
        self._generation += 1
        self.open()

    def end(self) -> None:
        """Close the node and the loop."""
        self.close()
        self._runner.close()

    async def _start(self) -> None:
        loop = asyncio.get_running_loop()
        opened: asyncio.Future[Node] = loop.create_future()
        self._leave = asyncio.Event()
        self._life = loop.create_task(self._live(opened))
        await asyncio.wait((opened, self._life), return_when=asyncio.FIRST_COMPLETED)
        if self._life.done():
            self._life.result()
        self.node = opened.result()

    async def _live(self, opened: "asyncio.Future[Node]") -> None:
        async with open_node(self.path, config=self._config) as node:
            opened.set_result(node)
            await self._leave.wait()

    async def _stop(self) -> None:
        self._leave.set()
        assert self._life is not None
        await self._life
