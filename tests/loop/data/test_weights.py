"""Weights of samples and classes that no loss can use are one line each."""

import keras
import numpy as np
import pytest

from pool import pool
from refusals import refused

X = np.zeros((4, 16, 16, 3), "float32")
Y = np.array([0, 1, 2, 0])
REFUSED = {
    "a class beyond": ({"class_weight": {9: 5.0}}, "has the class 9; give 0 to 2"),
    "the text of a number": ({"class_weight": {"0": 2.0}}, "has the class '0'; give 0 to 2"),
    "part of a class": ({"class_weight": {0.5: 1.0}}, "has the class 0.5; give 0 to 2"),
    "weights in a list": ({"class_weight": [1.0, 2.0, 3.0]}, "give a weight by class"),
    "a negative class weight": ({"class_weight": {0: -1.0}}, "is -1.0; give a number from 0"),
    "a class weight of NaN": ({"class_weight": {0: np.nan}}, "is nan; give a number from 0"),
    "no class weight": ({"class_weight": {1: None}}, "of class 1 is None; give a number from 0"),
    "NaN": ({"sample_weight": np.array([np.nan, 1, 1, 1])}, "has nan; give finite numbers"),
    "texts": ({"sample_weight": np.array(["a"] * 4)}, "has the dtype <U1; give numbers"),
    "two of each sample": ({"sample_weight": np.ones((4, 2))}, r"has shape \(4, 2\) beside labels"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_of_a_classifier(name):
    given, message = REFUSED[name]
    method = "train_on_batch" if "class_weight" in given else "test_on_batch"
    with pool("vit_debug", num_classes=3, num_layers=1, preprocessor=None) as model:
        refused(message, model.fit, X, Y, verbose=0, **given)
        refused(message, getattr(model, method), X, Y, **given)


def test_several_classes_of_a_sample_have_no_class_weight():
    with pool("vit_debug", num_classes=3, num_layers=1, preprocessor=None) as model:
        bits = np.zeros((4, 16, 3), "int32")
        message = r"class_weight needs one label per sample, and labels have shape \(4, 16, 3\)"
        model.compile(loss=keras.losses.MeanSquaredError())
        refused(message, model.train_on_batch, X, bits, class_weight={0: 2.0})


def test_one_logit_is_of_two_classes():
    settings = {"num_classes": 1, "problem_type": "multi_label_classification"}
    with pool("vit_debug", num_layers=1, preprocessor=None, **settings) as model:
        both = [
            model.test_on_batch(X, Y % 2)[0],
            model.fit(X, Y % 2, class_weight={1: 1.0}, verbose=0).history["loss"][0],
        ]
        weighted = model.fit(X, Y % 2, class_weight={0: 0.0, 1: 0.0}, verbose=0)
    assert both[0] == pytest.approx(both[1], rel=1e-5) and weighted.history["loss"] == [0.0]
