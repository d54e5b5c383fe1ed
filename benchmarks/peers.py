"""Other implementations, each in an environment of its own, made of public packages when first needed."""

from __future__ import annotations

import sys
from pathlib import Path
from threading import Lock

from .cells import Cell
from .environments import environment

UPSTREAM = "transformers==5.24.0"
PACKAGES: dict[str, tuple[str, ...]] = {
    "fair-esm": ("fair-esm==2.0.0", UPSTREAM),
    "flashdeberta": ("flashdeberta==0.0.8", UPSTREAM),
    "disentangled-flash": ("disentangled-flash==1.1.1", UPSTREAM),
    "faesm": ("faesm==0.1.1", "transformers==4.46.3"),  # it takes what later releases no longer have
    "esm-cpp": ("esm-cpp==0.2.1", "numpy==1.26.4", UPSTREAM),  # it refuses numpy 2
    "onnxruntime": ("onnxruntime==1.32.0", "onnx==1.23.2", "onnxscript==0.7.2", UPSTREAM),
}
"""What is installed beside torch and this project.

Microsoft's DeBERTa 0.1.12 and esm-efficient are not here, since they do not install: the one needs the
package `sklearn`, which refuses to; the other's build needs torch in it, and then flash-attn.
"""
HISTORIC = {
    "Deberta": "transformers==4.46.3",
    "DebertaV2": "transformers==4.46.3",
    "Esm": "transformers==4.33.3",
}
"""The releases that the reports of in-place writes were made about."""
_making = Lock()


def packages_of(cell: Cell) -> tuple[str, ...]:
    """What the cell's implementation needs in an environment of its own; nothing where it runs here."""
    if cell.impl == "transformers-historic":
        return (HISTORIC[cell.family],)
    return PACKAGES.get(cell.impl, ())


def interpreter(cell: Cell, home: Path) -> Path:
    """The Python that runs the cell's implementation: this one, or that of an environment in the folder.

    Raises:
        subprocess.CalledProcessError: its packages cannot be installed.
    """
    packages = packages_of(cell)
    if not packages:
        return Path(sys.executable)
    with _making:
        return environment(home / packages[0].replace("==", "-"), packages, with_project=True)
