"""What a verification says: where something is not as it should be, what, and the next step. Pure.

It is *damage* when something acknowledged cannot be read as it was written, or when parts do not
belong together; a *warning* when nothing is lost: left-overs, files of others, a lease that only
holds retention.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, unique

from wal.errors import Corrupt, StreamingNodeError

OnStep = Callable[[str, int], None]
"""Told of each step of a long work: what is done, and with how many bytes. What it raises ends the
work.
"""

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


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that is not as it should be; `place` is a path in the node directory, or a part of
    a log.
    """

    severity: Severity
    place: str
    detail: str
    next_step: str


@dataclass(slots=True)
class Report:
    """What was looked at and what was found. `counts` are of things checked, `bytes` of bytes
    read.
    """

    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    on_step: OnStep = field(default=no_progress, repr=False, compare=False)

    def damage(self, place: str, detail: str, next_step: str = RESTORE) -> None:
        """Add a finding that something acknowledged is not there as it was written."""
        self.findings.append(Finding(Severity.DAMAGE, place, detail, next_step))

    def error(self, place: str, error: Exception, next_step: str = "") -> None:
        """Add what a reader of the engine raised, as damage: its text, and its next step unless
        another one is given.
        """
        detail, _, step = str(error).partition(" — ")
        self.damage(
            place, detail, next_step or (RESTORE if step in {"", Corrupt.next_step} else step)
        )

    @contextmanager
    def errors_at(self, place: str, next_step: str = "") -> Iterator[None]:
        """Add what is raised in the block, as `error` does, and go on behind it."""
        try:
            yield
        except (OSError, StreamingNodeError) as error:
            self.error(place, error, next_step)

    def warn(self, place: str, detail: str, next_step: str) -> None:
        """Add a finding by which nothing is lost."""
        self.findings.append(Finding(Severity.WARNING, place, detail, next_step))

    def count(self, what: str, number: int = 1) -> None:
        """Say that so many more of something were checked."""
        self.counts[what] = self.counts.get(what, 0) + number

    def read(self, part: str, number: int) -> None:
        """Say that so many bytes of a part were read."""
        self.bytes += number
        self.on_step(part, number)

    @property
    def damages(self) -> list[Finding]:
        """The findings by which something is lost or does not belong together."""
        return [finding for finding in self.findings if finding.severity is Severity.DAMAGE]

    @property
    def worst(self) -> Severity | None:
        """The severity of the worst finding, None when all is sound."""
        return Severity.DAMAGE if self.damages else Severity.WARNING if self.findings else None
