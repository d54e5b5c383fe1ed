"""Configurations: what they refuse, what they keep, and how labels follow each other."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import tiny
import transformers

import outplace

FAMILIES = ["DebertaConfig", "DebertaV2Config", "EsmConfig"]


@pytest.mark.parametrize("family", FAMILIES)
def test_defaults_equal_upstreams(family: str) -> None:
    ours, theirs = getattr(outplace, family)(), getattr(transformers, family)()
    differing = {
        name
        for name, value in vars(ours).items()
        if hasattr(theirs, name) and getattr(theirs, name) != value and name != "attn_implementation"
    }
    assert differing == set()


@pytest.mark.parametrize("family", FAMILIES)
def test_upstreams_config_file_and_ours_read_each_other(family: str, tmp_path: Path) -> None:
    fields = tiny.CONFIGS[family.removesuffix("Config")] | {"num_labels": 3, "problem_type": "regression"}
    theirs = getattr(transformers, family)(**fields)
    theirs.save_pretrained(tmp_path)
    ours = getattr(outplace, family).from_pretrained(tmp_path)
    ours.save_pretrained(tmp_path)
    back = getattr(transformers, family).from_pretrained(tmp_path)
    for name in fields:
        assert getattr(ours, name) == getattr(theirs, name) == getattr(back, name)
    assert ours.id2label == back.id2label == {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}


def test_an_unknown_key_of_a_file_is_kept_and_saved_back(tmp_path: Path) -> None:
    config = outplace.EsmConfig.from_dict({"vocab_size": 33, "summary_style": {"deep": [1, 2]}})
    assert config.summary_style == {"deep": [1, 2]}
    config.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["summary_style"] == {"deep": [1, 2]}


def test_an_unknown_keyword_is_an_error_that_names_the_nearest_field() -> None:
    with pytest.raises(TypeError, match="hidden_sise"):
        outplace.DebertaConfig(hidden_sise=3)
    with pytest.raises(TypeError, match="no field 'num_label'; did you mean 'num_labels'"):
        outplace.DebertaConfig.from_dict({}, num_label=3)


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        ("DebertaConfig", {"hidden_size": "768"}, "hidden_size is '768'.*int"),
        ("DebertaConfig", {"hidden_size": True}, "hidden_size is True"),
        ("DebertaConfig", {"num_labels": "two"}, "num_labels is 'two'"),
        ("DebertaConfig", {"id2label": ["no", "yes"]}, r"id2label is \['no', 'yes'\]"),
        ("DebertaConfig", {"hidden_size": 770}, "num_attention_heads is 12.*770"),
        ("DebertaConfig", {"num_hidden_layers": 0}, "num_hidden_layers is 0"),
        ("DebertaConfig", {"hidden_dropout_prob": 1.5}, "hidden_dropout_prob is 1.5"),
        ("DebertaConfig", {"hidden_act": "geluu"}, "hidden_act is 'geluu'.*gelu"),
        ("DebertaConfig", {"pos_att_type": "c2q"}, "pos_att_type is .*c2p"),
        ("DebertaConfig", {"pooler_hidden_size": 3}, "pooler_hidden_size is 3.*768"),
        ("DebertaConfig", {"pad_token_id": -1}, "pad_token_id is -1"),
        ("DebertaConfig", {"attn_implementation": "triton", "talking_head": True}, "talking heads mix"),
        ("EsmConfig", {"attn_implementation": "triton"}, "attn_implementation is 'triton'.*ESM has none"),
        ("DebertaConfig", {"attn_implementation": "sdpa", "talking_head": True}, "talking heads mix"),
        ("DebertaConfig", {"attn_implementation": "blockwise", "talking_head": True}, "talking heads mix"),
        ("EsmConfig", {"attn_implementation": "blockwise"}, "ESM has none"),
        ("DebertaConfig", {"enhanced_mask_decoder": True}, "enhanced_mask_decoder is True"),
        ("DebertaConfig", {"problem_type": "ranking"}, "problem_type is 'ranking'"),
        (
            "DebertaConfig",
            {"problem_type": "single_label_classification", "num_labels": 1},
            "problem_type is .*one label",
        ),
        ("DebertaConfig", {"num_labels": 3, "id2label": {0: "a"}}, "num_labels is 3.*1 classes"),
        ("DebertaV2Config", {"conv_kernel_size": 4}, "conv_kernel_size is 4"),
        ("DebertaV2Config", {"conv_kernel_size": 3, "conv_groups": 7}, "conv_groups is 7"),
        ("DebertaV2Config", {"attention_head_size": 3}, "attention_head_size is 3"),
        ("DebertaV2Config", {"norm_rel_ebd": "rms"}, "norm_rel_ebd is 'rms'"),
        (
            "DebertaV2Config",
            {"relative_attention": True, "position_buckets": 2000},
            "position_buckets is 2000",
        ),
        (
            "EsmConfig",
            {"position_embedding_type": "relative_key"},
            "position_embedding_type is 'relative_key'",
        ),
        ("EsmConfig", {"is_decoder": True}, "is_decoder is True.*not supported"),
        ("EsmConfig", {"add_cross_attention": True}, "add_cross_attention is True.*not supported"),
        ("EsmConfig", {"is_folding_model": True}, "is_folding_model is True.*ESMFold"),
        (
            "EsmConfig",
            {"position_embedding_type": "rotary", "hidden_size": 36},
            "num_attention_heads is 12.*width 3",
        ),
    ],
    ids=str,
)
def test_an_impossible_value_is_an_error_that_names_the_field(
    family: str, fields: dict[str, object], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        getattr(outplace, family)(**fields)


@pytest.mark.parametrize("missing", ["vocab_size", "pad_token_id", "mask_token_id"])
def test_an_esm_model_says_which_field_its_config_leaves_unset(missing: str) -> None:
    fields = {"vocab_size": 33, "pad_token_id": 1, "mask_token_id": 32, "token_dropout": True} | {
        missing: None
    }
    with pytest.raises(ValueError, match=rf"EsmConfig\.{missing} is None"):
        outplace.EsmModel(outplace.EsmConfig(**tiny.SHAPE, **fields))


def test_labels_follow_each_other() -> None:
    config = outplace.DebertaConfig(id2label={"0": "no", "1": "yes", "2": "maybe"})
    assert config.num_labels == 3
    assert config.label2id == {"no": 0, "yes": 1, "maybe": 2}
    config.num_labels = 2
    assert config.id2label == {0: "LABEL_0", 1: "LABEL_1"}
    config.id2label = {0: "only"}
    assert (config.num_labels, config.label2id) == (1, {"only": 0})
    assert outplace.DebertaConfig().num_labels == 2


def test_a_config_of_another_family_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'esm'.*'deberta-v2'"):
        outplace.EsmConfig.from_dict({"model_type": "deberta-v2"})


@pytest.mark.parametrize("content", ["[1, 2]", "{", "\xff"])
def test_a_config_file_that_is_no_json_object_is_an_error_naming_it(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ValueError, match=r"config\.json"):
        outplace.EsmConfig.from_pretrained(tmp_path)


def test_the_older_name_of_dtype_is_read() -> None:
    assert outplace.EsmConfig.from_dict({"torch_dtype": "float16"}).dtype == "float16"
