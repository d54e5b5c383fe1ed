"""Other implementations, each in an environment of its own, made of public packages when first needed."""

from __future__ import annotations

from pathlib import Path

from .environments import environment

PACKAGES: dict[str, tuple[str, ...]] = {
    "fair-esm": ("fair-esm==2.0.0", "transformers==5.24.0"),
    "flashdeberta": ("flashdeberta==0.0.8", "transformers==5.24.0"),
    "disentangled-flash": ("disentangled-flash==1.1.1", "transformers==5.24.0"),
    "faesm": ("faesm==0.1.1", "transformers==5.24.0"),
}
"""What is installed beside torch and this project."""


def interpreter(impl: str, home: Path) -> Path:
    """The Python that runs an implementation.

    Raises:
        subprocess.CalledProcessError: its packages cannot be installed.
    """
    return environment(home / impl, PACKAGES[impl], with_project=True)
