"""Every error that a user can cause: what happened, and what to do next."""


class ConFuError(Exception):
    """Base class. The message is one or two plain sentences fit for a page or a terminal."""


class SettingsError(ConFuError):
    """A setting lies outside the range that is supported; the message names the range."""


class PromptError(ConFuError):
    """A prompt that cannot be decoded: empty, or longer than the target's context."""


class TargetError(ConFuError):
    """A target that cannot be fetched, loaded, or decoded with."""


class CheckpointError(ConFuError):
    """A draft head that is missing, damaged, incomplete, or made for another target."""


class TraceError(ConFuError):
    """A trace that is damaged or of an unknown version; the message names the place."""


class DataError(ConFuError):
    """Training text, a question file or a benchmark's result that cannot be used; the message names
    the place."""
