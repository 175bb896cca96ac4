"""What a repair would do, and what it would not. Pure.

A plan has actions, each naming what it touches and why, and what is left: damage that no action mends. Nothing is
removed by any action: what is replaced or in the way goes to `quarantine/<time>/`. Nothing is invented: bytes come from
the node itself, from a backup where a checksum that the node has proves them, or are time ticks, which carry no rows.
"""

from dataclasses import dataclass, field
from enum import Enum, unique


@unique
class ActionKind(Enum):
    """What an action does; the values are stable, machines go by them."""

    MOVE = "move aside"
    """Something that is none of the node's, or that nothing names, goes to quarantine."""
    REPLACE = "replace from backup"
    """A damaged or missing file is replaced by the backup's, whose checksum is the one the node knows."""
    NEW_FLOOR = "write a new floor file"
    """The floor file is written anew from the database."""
    NEW_LOG = "build the log anew"
    """The entries that are whole and follow each other go into a new database; the damaged one goes to quarantine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Action:
    """One step; `place` is relative to the node directory.

    `gives_up` names what is lost by it: acknowledged rows, or log that a named reader has not read.
    """

    kind: ActionKind
    place: str
    reason: str
    gives_up: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Left:
    """Damage that stays, with what helps against it."""

    place: str
    reason: str
    next_step: str


@dataclass(slots=True)
class RepairPlan:
    """Actions in the order in which they are done, and what they leave."""

    actions: list[Action] = field(default_factory=list)
    left: list[Left] = field(default_factory=list)

    def act(self, kind: ActionKind, place: str, reason: str, *, gives_up: tuple[str, ...] = ()) -> None:
        """Add an action."""
        self.actions.append(Action(kind=kind, place=place, reason=reason, gives_up=gives_up))

    def leave(self, place: str, reason: str, next_step: str) -> None:
        """Add something that stays as it is."""
        self.left.append(Left(place=place, reason=reason, next_step=next_step))
