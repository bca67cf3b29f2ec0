"""The result of asking memory for room, and how the results of several parts are combined (MC-1..3)."""

from enum import Enum


class Status(Enum):
    """The outcome of a prepare."""

    SUCCESS = "success"
    NO_UPDATE = "no_update"  # nothing is pending, so there is nothing to apply
    FAILED_PREPARE = "failed_prepare"  # no room
    FAILED_COMPUTE = "failed_compute"

    @property
    def is_failure(self) -> bool:
        return self in (Status.FAILED_PREPARE, Status.FAILED_COMPUTE)


def combine(a: Status, b: Status) -> Status:
    """The status of two parts together: the first failure, else success if either has it (MC-3)."""
    if a.is_failure:
        return a
    if b.is_failure:
        return b
    return Status.SUCCESS if Status.SUCCESS in (a, b) else Status.NO_UPDATE
