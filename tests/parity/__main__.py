"""Print the parity table as Markdown: how far we are from upstream, in float32, one row a configuration."""

from __future__ import annotations

from collections import defaultdict

import torch
import transformers

from .test_parity import CASES, measure


def main() -> None:
    rows: dict[tuple[str, str], list[tuple[float, float]]] = defaultdict(list)
    for case in CASES:
        variant = case.variant.removesuffix(", legacy=False") + (", sdpa" if case.attention == "sdpa" else "")
        rows[case.family, variant].append(measure(case))
    print(f"transformers {transformers.__version__}, torch {torch.__version__}, float32, CPU\n")
    print("| family | configuration | classes | outputs | gradients |")
    print("| --- | --- | ---: | ---: | ---: |")
    for (family, variant), measured in rows.items():
        outputs, gradients = (max(column) for column in zip(*measured, strict=True))
        cells = [family, variant.replace("|", "\\|"), str(len(measured)), _shown(outputs), _shown(gradients)]
        print("| " + " | ".join(cells) + " |")


def _shown(difference: float) -> str:
    return "0" if difference == 0 else f"{difference:.1e}"


if __name__ == "__main__":
    main()
