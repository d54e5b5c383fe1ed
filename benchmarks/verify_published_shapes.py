"""`outplace verify` on checkpoints of the published models' shapes with random weights.

Upstream writes the checkpoints. Those of DeBERTa hold the original's masked-language head and name no
class, as the published ones do. Weights are wide enough for every term to count. One checkpoint at a time
is made, verified and deleted. `python benchmarks/verify_published_shapes.py` prints a table; `--out`
writes the figures as JSON; names of models choose some of them.
"""

from __future__ import annotations

import argparse
import json
import platform
import tempfile
from pathlib import Path
from typing import Any

from outplace.benchmarks.shapes import MODELS


def write_checkpoint(family: str, fields: dict[str, Any], folder: Path) -> int:
    """A masked-language model with seeded weights; returns the number of its parameters."""
    import torch
    import transformers

    import outplace

    deberta = family.startswith("Deberta")
    config = getattr(transformers, f"{family}Config")(**fields, **({"legacy": False} if deberta else {}))
    model = getattr(transformers, f"{family}ForMaskedLM")(config)
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim == 1:
                parameter.normal_(1.0 if name.endswith("orm.weight") else 0.0, 0.1)
            else:
                parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
    model.save_pretrained(folder)
    if deberta:
        path = folder / "config.json"
        values = json.loads(path.read_text())
        path.write_text(
            json.dumps({key: x for key, x in values.items() if key not in ("legacy", "architectures")})
        )
    else:
        outplace.EsmTokenizer().save_pretrained(folder)
    return sum(parameter.numel() for parameter in model.parameters())


def measure(name: str) -> dict[str, Any]:
    """What `outplace verify` finds of one model."""
    from outplace.counterparts import Settings
    from outplace.verify import verify

    family, fields = MODELS[name]
    with tempfile.TemporaryDirectory() as folder:
        parameters = write_checkpoint(family, fields, Path(folder))
        report = verify(Settings(folder))
    return {
        "model": name,
        "class": report.class_name,
        "parameters": parameters,
        "inputs": report.inputs,
        "tokens": report.input_tokens,
        "outputs": len(report.differences),
        "worst": report.worst.name if report.worst.relative else None,
        "relative": report.worst.relative,
        "absolute": max(row.absolute for row in report.differences),
        "tokens_differing": report.tokens and report.tokens.differing,
        "missing": {library: keys.missing for library, keys in report.keys.items()},
        "unexpected": {library: keys.unexpected for library, keys in report.keys.items()},
        "within": report.within,
        "versions": report.versions,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="MODEL", help=f"of {', '.join(MODELS)}")
    parser.add_argument("--out", type=Path, help="write the figures to this JSON file")
    args = parser.parse_args()
    rows = []
    print("| model | parameters | tokens | largest difference, relative | absolute | of |")
    print("| --- | ---: | ---: | ---: | ---: | --- |")
    for name in args.names or MODELS:
        row = measure(name)
        rows.append(row)
        print(
            f"| {name} | {row['parameters'] / 1e6:,.0f} M | {row['tokens']} | {row['relative']:.1e} "
            f"| {row['absolute']:.1e} | {row['worst'] or 'none'} |",
            flush=True,
        )
    if args.out:
        environment = {"python": platform.python_version(), "machine": platform.machine()}
        args.out.write_text(json.dumps({"environment": environment, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
