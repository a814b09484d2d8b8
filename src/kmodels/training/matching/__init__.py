"""The loss of models that predict a set of masks, each with a class."""
