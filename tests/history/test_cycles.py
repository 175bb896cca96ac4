"""Cycles: found when there is one, by the name of the weakest promise they break, and not when an
order exists.
"""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.chaos.judge.cycles import Edge, Reason, find_cycles

WW = Reason.WRITE_WRITE
WR = Reason.WRITE_READ
RW = Reason.READ_WRITE
TIME = Reason.TIME


@pytest.mark.parametrize(
    "reasons, name",
    [
        ((WW, WW), "G0"),
        ((WW, WR), "G1c"),
        ((WR, WR, WR), "G1c"),
        ((WR, RW), "G2"),
        ((RW, RW, WR), "G2"),
        ((WW, TIME), "real time"),
    ],
)
def test_a_cycle_is_named_by_its_reasons(reasons: tuple[Reason, ...], name: str) -> None:
    nodes = range(len(reasons))
    edges = [
        Edge(node, (node + 1) % len(reasons), reason)
        for node, reason in zip(nodes, reasons, strict=True)
    ]
    (cycle,) = find_cycles([*edges, Edge("outside", 0, RW), Edge(0, "beyond", RW)])
    assert cycle.name == name
    assert set(cycle.nodes) == set(nodes)


@given(
    st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30))), st.randoms(use_true_random=False)
)
def test_edges_along_an_order_have_no_cycle(
    pairs: list[tuple[int, int]], choose: random.Random
) -> None:
    edges = [Edge(min(pair), max(pair), WW) for pair in pairs]
    choose.shuffle(edges)
    assert find_cycles(edges) == []


@given(st.lists(st.tuples(st.integers(0, 8), st.integers(0, 8)), max_size=20))
def test_a_cycle_is_found_exactly_when_a_node_reaches_itself(pairs: list[tuple[int, int]]) -> None:
    pairs = [pair for pair in pairs if pair[0] != pair[1]]
    reach = set(pairs)
    for middle in range(9):
        reach |= {(a, d) for a, b in reach if b == middle for c, d in reach if c == middle}
    tangled = any((node, node) in reach for node in range(9))
    cycles = find_cycles(Edge(a, b, WW) for a, b in pairs)
    assert bool(cycles) == tangled
    for cycle in cycles:
        around = zip(cycle.nodes, (*cycle.nodes[1:], cycle.nodes[0]), strict=True)
        assert set(around) <= set(pairs)


def test_a_long_chain_does_not_exhaust_the_stack() -> None:
    edges = [Edge(node, node + 1, WW) for node in range(50_000)]
    assert find_cycles(edges) == []
    assert len(find_cycles([*edges, Edge(50_000, 0, RW)])) == 1
