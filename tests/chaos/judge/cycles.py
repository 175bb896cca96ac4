"""Cycles among what calls did to each other: what no order of them, one after the other, can
explain.

In: edges between nodes, each with its reason. Out: one cycle of each tangle, named as Adya names
it. Linear in nodes and edges: strongly connected components without recursion.

    write before write (a version follows another), write before read (a read saw it), read before
    write (a read did not see it), time (one call had ended when the other began) G0: writes only
    G1c: writes and what was read    G2: with a write that a read did not see    with time: real
    time
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass
from enum import Enum

Node = Hashable


class Reason(Enum):
    """Why one node comes before another."""

    WRITE_WRITE = "ww"
    WRITE_READ = "wr"
    READ_WRITE = "rw"
    TIME = "time"


@dataclass(frozen=True, slots=True)
class Edge:
    """`before` comes before `after`."""

    before: Node
    after: Node
    reason: Reason


@dataclass(frozen=True, slots=True)
class Cycle:
    """Nodes that each come before the next, and the last before the first."""

    nodes: tuple[Node, ...]
    reasons: frozenset[Reason]

    @property
    def name(self) -> str:
        """The weakest guarantee it breaks."""
        if Reason.TIME in self.reasons:
            return "real time"
        if Reason.READ_WRITE in self.reasons:
            return "G2"
        return "G1c" if Reason.WRITE_READ in self.reasons else "G0"


def find_cycles(edges: Iterable[Edge]) -> list[Cycle]:
    """Return a shortest cycle through one node of each tangle; empty when an order exists."""
    graph: dict[Node, list[Edge]] = defaultdict(list)
    for edge in edges:
        if edge.before != edge.after:
            graph[edge.before].append(edge)
    return [_shortest_cycle(graph, members) for members in _tangles(graph)]


def _tangles(graph: dict[Node, list[Edge]]) -> Iterator[frozenset[Node]]:
    """Yield the strongly connected components of more than one node (Tarjan, with a stack of its
    own).
    """
    index: dict[Node, int] = {}
    low: dict[Node, int] = {}
    stack: list[Node] = []
    on_stack: set[Node] = set()
    for root in list(graph):
        work: list[tuple[Node, Iterator[Edge]]] = []
        if root not in index:
            _enter(root, graph, index, low, stack, on_stack, work)
        while work:
            node, rest = work[-1]
            following = next(rest, None)
            if following is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[node])
                if low[node] == index[node]:
                    members = _pop_until(node, stack, on_stack)
                    if len(members) > 1:
                        yield members
            elif following.after not in index:
                _enter(following.after, graph, index, low, stack, on_stack, work)
            elif following.after in on_stack:
                low[node] = min(low[node], index[following.after])


def _enter(
    node: Node,
    graph: dict[Node, list[Edge]],
    index: dict[Node, int],
    low: dict[Node, int],
    stack: list[Node],
    on_stack: set[Node],
    work: list[tuple[Node, Iterator[Edge]]],
) -> None:
    index[node] = low[node] = len(index)
    stack.append(node)
    on_stack.add(node)
    work.append((node, iter(graph.get(node, ()))))


def _pop_until(node: Node, stack: list[Node], on_stack: set[Node]) -> frozenset[Node]:
    members = set()
    while True:
        member = stack.pop()
        on_stack.discard(member)
        members.add(member)
        if member == node:
            return frozenset(members)


def _shortest_cycle(graph: dict[Node, list[Edge]], members: frozenset[Node]) -> Cycle:
    start = min(members, key=repr)
    came_by: dict[Node, Edge] = {}
    queue = deque([start])
    while queue:
        node = queue.popleft()
        for edge in graph.get(node, ()):
            if edge.after == start:
                return _cycle_of(start, [*_path_to(node, start, came_by), edge])
            if edge.after in members and edge.after not in came_by:
                came_by[edge.after] = edge
                queue.append(edge.after)
    raise AssertionError("every node of a tangle is on a cycle")


def _path_to(node: Node, start: Node, came_by: dict[Node, Edge]) -> list[Edge]:
    path: list[Edge] = []
    while node != start:
        path.append(came_by[node])
        node = came_by[node].before
    return path[::-1]


def _cycle_of(start: Node, edges: list[Edge]) -> Cycle:
    return Cycle(
        (start, *(edge.after for edge in edges[:-1])), frozenset(edge.reason for edge in edges)
    )
