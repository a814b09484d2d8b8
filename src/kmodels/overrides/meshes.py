"""What an override needs to know of `keras.distribution`."""

import keras


def layers_are_cut() -> bool:
    """Whether a layer's arithmetic may be spread over devices, heads or vocabulary in parts.

    Under ModelParallel it may, but for a mesh of kmodels that cuts rows and weights alone: there a
    weight is whole where a layer uses it.
    """
    distribution = keras.distribution.distribution()
    return isinstance(distribution, keras.distribution.ModelParallel) and getattr(
        distribution, "cuts_layers", True
    )
