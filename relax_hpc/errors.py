"""Typed errors: each message says what failed, where, what was seen, and what to do."""


class RelaxError(Exception):
    """Base of every error that relax_hpc raises on purpose."""

    exit_code = 1


class ConfigError(RelaxError):
    """A recipe, an override or an environment variable is wrong; nothing was started."""

    exit_code = 2


class SlurmError(RelaxError):
    """A Slurm command failed or answered something unexpected."""


class TopologyError(RelaxError):
    """Nodes, GPUs or ranks cannot be placed as asked."""


class ControlError(RelaxError):
    """A control message could not be delivered or was refused."""


class DeadlineError(ControlError):
    """A wait ended at its deadline; the message names the wait, its owner and the last state."""


class StaleIncarnationError(ControlError):
    """A message of an older incarnation of a role or attempt was refused."""


class TransferError(RelaxError):
    """The transfer queue refused or lost something; nothing wrong was delivered."""


class StaleEpochError(TransferError):
    """A reference to payload whose place was given to newer data: the reader came too late."""


class ArenaFullError(TransferError):
    """Shared memory (and the spill, where there is one) has no room; nothing was left behind."""


class WeightSyncError(RelaxError):
    """A weight version is incomplete, corrupt or unknown; the old one keeps being served."""


class CheckpointError(RelaxError):
    """A checkpoint could not be written, verified or read."""


class EngineError(RelaxError):
    """An inference engine failed to start, answer or update."""


class MissingExtraError(RelaxError):
    """A package of an optional extra is not installed; the message names the extra."""

    exit_code = 2


def require_extra(module: str, extra: str, cause: ImportError) -> MissingExtraError:
    """Build the error for a missing optional package: `raise require_extra(...) from err`."""
    return MissingExtraError(
        f"{module} is needed here but not installed ({cause}): pip install 'relax_hpc[{extra}]'"
    )
