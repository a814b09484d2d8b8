"""The messages of .model files: those of the sentencepiece package, and of no other sort."""

import pytest

from kmodels.text import demo, sentencepiece
from kmodels.text.pieces import BYTE, NORMAL, UNUSED
from kmodels.text.sentencepiece_proto import model_class
from refusals import refused
from sentencepiece_files import field, sentencepiece_model

PIECES = [("<unk>", 0.0, 2), ("\u2581a", -1.5, NORMAL), ("é", -2.0, UNUSED), ("<0x00>", 0.0, BYTE)]


def test_fields_are_those_of_a_file_written_by_hand():
    model = model_class().FromString(sentencepiece_model(PIECES, kind=2, prefix=True))
    assert [(p.piece.decode(), p.score, p.type) for p in model.pieces] == PIECES
    assert (model.trainer_spec.model_type, model.trainer_spec.byte_fallback) == (2, True)
    rules = model.normalizer_spec
    assert (rules.name, rules.precompiled_charsmap) == (b"identity", b"")
    assert (rules.add_dummy_prefix, rules.remove_extra_whitespaces) == (True, False)


def test_what_a_file_leaves_out_is_the_default_of_sentencepiece():
    model = model_class().FromString(field(1, field(1, b"a")))
    (piece,) = model.pieces
    assert (piece.score, piece.type, model.trainer_spec.model_type) == (0.0, NORMAL, 1)
    assert not model.trainer_spec.byte_fallback
    rules = model.normalizer_spec
    assert rules.add_dummy_prefix and rules.remove_extra_whitespaces and rules.escape_whitespaces


@pytest.mark.parametrize(
    "content",
    [
        sentencepiece_model(PIECES)[:-3],
        field(1, field(1, b"\xff\xfe")),
        field(1, b"\x0a\xff"),
        b"\x0f\x01",
        b"\xff" * 20,
        b"",
    ],
    ids=["cut", "no UTF-8", "cut piece", "wire type 7", "long varint", "empty"],
)
def test_a_damaged_file_is_told_in_a_line(content):
    refused("x is not a SentencePiece model: ", sentencepiece.parse, content, "x")


@pytest.mark.needs("sentencepiece")
def test_the_package_writes_the_same_bytes():
    from sentencepiece import sentencepiece_model_pb2

    import hub_models

    ours = hub_models.tokenizer(demo.texts()).to_sentencepiece()
    theirs = sentencepiece_model_pb2.ModelProto.FromString(ours)
    assert len(theirs.pieces) > 300 and theirs.trainer_spec.model_type == 2
    # Nothing in the file is unknown to them, and the order of fields is theirs.
    assert theirs.SerializeToString(deterministic=True) == ours
    assert model_class().FromString(ours).SerializeToString(deterministic=True) == ours
    kept = model_class().FromString(theirs.SerializeToString())
    for mine, other in zip(kept.pieces, theirs.pieces, strict=True):
        assert (mine.piece.decode(), mine.score, mine.type) == (
            other.piece, other.score, other.type
        )  # fmt: skip
    for spec in ("trainer_spec", "normalizer_spec"):
        for place, value in getattr(kept, spec).ListFields():
            found = getattr(getattr(theirs, spec), place.name)
            assert found == (
                value.decode()
                if isinstance(value, bytes) and not isinstance(found, bytes)
                else value
            )
