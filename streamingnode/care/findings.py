"""The findings of a verification: each with a place, a detail and the next step. Pure.

A finding is *damage* when acknowledged data cannot be read as written, or when parts do not belong
together. It is a *warning* when nothing is lost: left-overs, foreign files, a lease that only holds
up retention.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import Enum, unique

from wal.errors import Corrupt, StreamingNodeError

OnStep = Callable[[str, int], None]
"""Called for each step of a long operation with the part and its number of bytes. An exception from
it ends the operation.
"""

RESTORE = (
    "restore the node, or a file of a cut, from a backup, "
    "or take out what can be read: streamingnode export DIR OUT --salvage"
)
"""The next step of many findings."""


def no_progress(_part: str, _done: int) -> None:
    """Ignore a step."""


@unique
class Severity(Enum):
    """The severity of a finding."""

    WARNING = "warning"
    DAMAGE = "damage"


@dataclass(frozen=True, slots=True)
class Finding:
    """One problem; `place` is a path in the node directory or a part of a log."""

    severity: Severity
    place: str
    detail: str
    next_step: str


@dataclass(slots=True)
class Report:
    """The result of a verification: findings, numbers of things checked (`counts`) and bytes read
    (`bytes`).
    """

    findings: list[Finding] = field(default_factory=list)
    counts: dict[str, int] = field(default_factory=dict)
    bytes: int = 0
    on_step: OnStep = field(default=no_progress, repr=False, compare=False)

    def damage(self, place: str, detail: str, next_step: str = RESTORE) -> None:
        """Add a damage: acknowledged data is missing or differs, or parts do not belong
        together.
        """
        self.findings.append(Finding(Severity.DAMAGE, place, detail, next_step))

    def error(self, place: str, error: Exception, next_step: str = "") -> None:
        """Add an exception of one of the engine's readers as damage, with its text, and its next
        step unless another one is given.
        """
        detail, _, step = str(error).partition(" — ")
        self.damage(
            place, detail, next_step or (RESTORE if step in {"", Corrupt.next_step} else step)
        )

    @contextmanager
    def errors_at(self, place: str, next_step: str = "") -> Iterator[None]:
        """Add an `OSError` or `StreamingNodeError` of the block as `error` does, and continue after
        the block.
        """
        try:
            yield
        except (OSError, StreamingNodeError) as error:
            self.error(place, error, next_step)

    def warn(self, place: str, detail: str, next_step: str) -> None:
        """Add a warning: nothing is lost."""
        self.findings.append(Finding(Severity.WARNING, place, detail, next_step))

    def count(self, what: str, number: int = 1) -> None:
        """Count `number` more checked things of a kind."""
        self.counts[what] = self.counts.get(what, 0) + number

    def read(self, part: str, number: int) -> None:
        """Count bytes read of a part, and call `on_step`."""
        self.bytes += number
        self.on_step(part, number)

    @property
    def damages(self) -> list[Finding]:
        """The findings that are damage."""
        return [finding for finding in self.findings if finding.severity is Severity.DAMAGE]

    @property
    def worst(self) -> Severity | None:
        """The severity of the worst finding, None when all is sound."""
        return Severity.DAMAGE if self.damages else Severity.WARNING if self.findings else None
