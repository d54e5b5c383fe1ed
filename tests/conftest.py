"""Which tests run where."""

from __future__ import annotations

import os

import pytest
import torch
from hypothesis import HealthCheck, settings

# Nothing in the default run may ask the Hub.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A busy machine is no failure.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
# The models are tiny: threads would only wait for each other.
torch.set_num_threads(1)


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="also run tests of minutes or gigabytes")
    parser.addoption("--hub", action="store_true", help="also run tests that ask the Hugging Face Hub")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    reasons = {
        "slow": None if config.getoption("--slow") else "takes minutes or gigabytes: run with --slow",
        "hub": None if config.getoption("--hub") else "asks the Hugging Face Hub: run with --hub",
        "cuda": None if torch.cuda.is_available() else "needs a CUDA device",
    }
    for item in items:
        for mark, reason in reasons.items():
            if reason is not None and item.get_closest_marker(mark):
                item.add_marker(pytest.mark.skip(reason=reason))
