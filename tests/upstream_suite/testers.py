"""The classes that upstream's common model tests ask for, about the three families.

The runner beside this file lays it among the tests of the installed release. SIDE says whose models are
tested: "transformers" as they are, or "under", after `outplace.transformers.install()`.
"""

from __future__ import annotations

import importlib
import os
import unittest
from typing import Any, ClassVar

import transformers

from .test_configuration_common import ConfigTester
from .test_modeling_common import ModelTesterMixin, ids_tensor, random_attention_mask

if os.environ["SIDE"] == "under":
    importlib.import_module("outplace.transformers").install()

SIZES = {
    "vocab_size": 99,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 37,
    "hidden_act": "gelu",
    "hidden_dropout_prob": 0.1,
    "attention_probs_dropout_prob": 0.1,
    "max_position_embeddings": 512,
    "type_vocab_size": 16,
    "initializer_range": 0.02,
}
ABSOLUTE = {"relative_attention": False, "position_biased_input": True, "pos_att_type": None}


class Tester:
    """What the tests take sizes, a configuration and inputs from."""

    batch_size, seq_length, num_labels, num_choices = 4, 7, 3, 4
    is_training = True
    fields: ClassVar[dict[str, Any]]
    config_class: ClassVar[type]

    def __init__(self, parent: unittest.TestCase) -> None:
        self.parent = parent
        for name, value in self.fields.items():
            setattr(self, name, value)

    def get_config(self) -> Any:
        return self.config_class(**self.fields)

    def prepare_config_and_inputs_for_common(self) -> tuple[Any, dict[str, Any]]:
        shape = [self.batch_size, self.seq_length]
        inputs = {
            "input_ids": ids_tensor(shape, self.fields["vocab_size"]),
            "attention_mask": random_attention_mask(shape),
        }
        return self.get_config(), inputs


class DebertaTester(Tester):
    fields = SIZES | ABSOLUTE
    config_class = transformers.DebertaConfig


class DebertaV2Tester(Tester):
    fields = SIZES | ABSOLUTE
    config_class = transformers.DebertaV2Config


class EsmTester(Tester):
    fields = SIZES | {"vocab_size": 33, "pad_token_id": 1}
    config_class = transformers.EsmConfig


def classes(family: str, *heads: str) -> tuple[type, ...]:
    return tuple(getattr(transformers, family + head) for head in heads)


HEADS = ("Model", "ForMaskedLM", "ForSequenceClassification", "ForTokenClassification")


class Common(ModelTesterMixin):
    sizes_of: ClassVar[type[Tester]]
    test_torchscript = False
    fx_compatible = False
    has_config_test = True
    is_encoder_decoder = False

    def setUp(self) -> None:
        self.model_tester = self.sizes_of(self)
        self.config_tester = ConfigTester(self, config_class=self.sizes_of.config_class, hidden_size=37)

    def test_config(self) -> None:
        self.config_tester.run_common_tests()


class DebertaTest(Common, unittest.TestCase):
    sizes_of = DebertaTester
    all_model_classes = classes("Deberta", *HEADS, "ForQuestionAnswering")


class DebertaV2Test(Common, unittest.TestCase):
    sizes_of = DebertaV2Tester
    all_model_classes = classes("DebertaV2", *HEADS, "ForQuestionAnswering", "ForMultipleChoice")


class EsmTest(Common, unittest.TestCase):
    sizes_of = EsmTester
    test_mismatched_shapes = False
    all_model_classes = classes("Esm", *HEADS)


del Common, ModelTesterMixin
