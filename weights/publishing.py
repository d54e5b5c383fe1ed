"""Put a model and its tokenizer on the Hub."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from .hub import explained

if TYPE_CHECKING:
    from ..models.base import PretrainedModel

PARITY = {
    "deberta": "bitwise equal to",
    "deberta-v2": "bitwise equal to",
    "esm": "within 1e-6, relative to the output's largest value, of",
}
"""What the parity suite measures of float32 outputs on a CPU, by `model_type`."""
UPSTREAM = "transformers 5.24.0"

PIPELINES = {
    "ForMaskedLM": "fill-mask",
    "ForSequenceClassification": "text-classification",
    "ForTokenClassification": "token-classification",
    "ForQuestionAnswering": "question-answering",
    "ForMultipleChoice": "multiple-choice",
}


def push(
    repo_id: str,
    write: Callable[[Path], None],
    *,
    commit_message: str,
    card: str | None = None,
    token: str | bool | None = None,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
) -> str:
    """Upload what `write` puts into a folder, in one commit; returns the address of the commit or request.

    Weights of an older commit that the new one has no more are deleted by it, or they would be found first.

    Args:
        card: becomes `README.md` where the repository has none.

    Raises:
        FileNotFoundError: the Hub refuses or cannot be reached; the message says why.
    """
    from huggingface_hub import HfApi

    from outplace import __version__

    api = HfApi(token=token, library_name="outplace", library_version=__version__)
    with tempfile.TemporaryDirectory(prefix="outplace-") as name, explained(f"upload to {repo_id}", revision):
        folder = Path(name)
        write(folder)
        api.create_repo(repo_id, private=private, exist_ok=True)
        if revision is not None:
            api.create_branch(repo_id, branch=revision, exist_ok=True)
        if card is not None and not api.file_exists(repo_id, "README.md", revision=revision):
            (folder / "README.md").write_text(card, encoding="utf-8")
        stale = ["model*.safetensors", "model.safetensors.index.json"]
        commit = api.upload_folder(
            repo_id=repo_id,
            folder_path=folder,
            commit_message=commit_message,
            revision=revision,
            create_pr=create_pr,
            delete_patterns=stale if any(folder.glob("*.safetensors")) else None,
        )
    return str(commit.pr_url or commit.commit_url)


def model_card(model: PretrainedModel, repo_id: str) -> str:
    """A card: what the model is, what version wrote it, and how near its outputs are to upstream's."""
    import torch

    from outplace import __version__

    name, kind = type(model).__name__, model.config.model_type
    pipeline = next((task for head, task in PIPELINES.items() if name.endswith(head)), "feature-extraction")
    size = f"{model.num_parameters():,}"
    dtype = str(model.dtype).removeprefix("torch.")
    metadata = {"library_name": "outplace", "pipeline_tag": pipeline, "tags": f"[outplace, {kind}]"}
    head = "\n".join(f"{key}: {value}" for key, value in metadata.items())
    return f"""\
---
{head}
---

# {repo_id.rpartition("/")[2]}

A `{name}` of {size} parameters in {dtype}, written by outplace {__version__} with torch {torch.__version__}.

```python
import outplace

model, tokenizer = outplace.load("{repo_id}")
```

The files are those of transformers, whose `{name}` loads them too.

## Parity

In float32 on a CPU the outputs of this class are {PARITY[kind]} those of {UPSTREAM}, by outplace's parity
suite on random weights. For this checkpoint: `outplace verify {repo_id}`.
"""
