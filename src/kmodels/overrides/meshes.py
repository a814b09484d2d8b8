"""Facts about `keras.distribution` that overrides depend on."""

import keras


def layers_are_cut() -> bool:
    """Returns whether a layer's arithmetic may be sharded by heads or vocabulary.

    Under ModelParallel it may, except for a mesh of kmodels that cuts only rows and weights: there
    a weight is whole where a layer uses it.
    """
    distribution = keras.distribution.distribution()
    return isinstance(distribution, keras.distribution.ModelParallel) and getattr(
        distribution, "cuts_layers", True
    )
