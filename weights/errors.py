"""The error of a checkpoint that cannot be used."""


class CheckpointError(ValueError):
    """A checkpoint's file is damaged, foreign, or does not fit the model; the message names it."""
