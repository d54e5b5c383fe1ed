"""Checkpoints: found, read, renamed, loaded into models and written."""

from .errors import CheckpointError
from .loading import LoadReport

__all__ = ["CheckpointError", "LoadReport"]
