"""What a verification says: findings, each of a kind, at a place, with a next step. Pure.

A finding is *damage* when something acknowledged cannot be read as it was written, or when parts do not belong together; a
*warning* when nothing is lost: left-overs, files of others, a lease that only holds retention.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum, unique
from types import MappingProxyType

OnStep = Callable[[str, int], None]
"""Told of each step of a long work: what is done, and with how many bytes. What it raises ends the work."""

RESTORE = (
    "restore the node, or a file of a cut, from a backup, "
    "or take out what can be read: streamingnode export DIR OUT --salvage"
)
"""The next step that many findings share."""


def no_progress(_part: str, _done: int) -> None:
    """Take no note of a step."""


@unique
class Severity(Enum):
    """How bad a finding is."""

    WARNING = "warning"
    DAMAGE = "damage"


@unique
class Kind(Enum):
    """What is the matter; the values are stable, machines go by them."""

    CHECKSUM = "checksum"
    """Bytes are not those that were written."""
    LENGTH = "length"
    """A file is shorter or longer than its cut, or its backup, says."""
    MISSING = "missing"
    """Something that is named is not there."""
    GAP = "gap"
    """Positions of a log, or numbers of cuts, are missing or unreadable in between."""
    SHORT = "short"
    """A log or the state map ends before what was acknowledged."""
    UNREADABLE = "unreadable"
    """A part cannot be opened at all."""
    CONTENT = "content"
    """Every checksum holds, and yet it is not what it should be: counts, ranges, order."""
    DUPLICATE = "duplicate"
    """Something is there twice that may be there once."""
    FOREIGN = "foreign"
    """It belongs to another node, or to nobody."""
    MIXED = "mixed"
    """Parts are of different ages: a copy of one beside the original of another."""
    AHEAD = "ahead"
    """A table has taken cuts that this node never made."""
    BEHIND = "behind"
    """A named reader's place lies before the first position of its log: what it would read next is gone."""
    TORN = "torn"
    """The end of a log that a power cut took before it was synced; the node drops it when it starts."""
    UNFINISHED = "unfinished"
    """The creation of the node was cut off in a step that the next opening finishes."""
    ORPHAN = "orphan"
    """A left-over that nothing names; the node removes it when it starts."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One thing that is not as it should be; `place` is a path in the node directory, or a part of a log."""

    severity: Severity
    kind: Kind
    place: str
    detail: str
    next_step: str


@dataclass(slots=True)
class Report:
    """What was looked at and what was found. `counts` are of things checked, `bytes` of bytes read."""

    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    on_step: OnStep = field(default=no_progress, repr=False, compare=False)

    def damage(self, kind: Kind, place: str, detail: str, next_step: str = RESTORE) -> None:
        """Add a finding that something acknowledged is not there as it was written."""
        self._add(Severity.DAMAGE, kind, place, detail, next_step)

    def warn(self, kind: Kind, place: str, detail: str, next_step: str) -> None:
        """Add a finding by which nothing is lost."""
        self._add(Severity.WARNING, kind, place, detail, next_step)

    def _add(self, severity: Severity, kind: Kind, place: str, detail: str, step: str) -> None:
        self.findings.append(Finding(severity=severity, kind=kind, place=place, detail=detail, next_step=step))

    def count(self, what: str, number: int = 1) -> None:
        """Say that so many more of something were checked."""
        self.counts[what] = self.counts.get(what, 0) + number

    def read(self, part: str, number: int) -> None:
        """Say that so many bytes of a part were read."""
        self.bytes += number
        self.on_step(part, number)

    @property
    def worst(self) -> Severity | None:
        """The severity of the worst finding, None when all is sound."""
        if self.damaged:
            return Severity.DAMAGE
        return Severity.WARNING if self.findings else None

    @property
    def damages(self) -> list[Finding]:
        """The findings by which something is lost or does not belong together."""
        return [finding for finding in self.findings if finding.severity is Severity.DAMAGE]

    @property
    def damaged(self) -> bool:
        """Whether anything is lost or does not belong together."""
        return bool(self.damages)


EXIT_CODES = MappingProxyType({None: 0, Severity.WARNING: 1, Severity.DAMAGE: 3})
"""What `streamingnode verify` ends with."""
