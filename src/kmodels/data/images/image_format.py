"""Keras' setting of where channels stand, of which models and data here know one value."""

import keras

from kmodels.core.errors import InputError


def check_channels_last() -> None:
    """Raises `InputError` where Keras' `image_data_format` is not "channels_last".

    It is asked wherever a model is made or images are taken in: what comes from an image read
    the other way round may have a shape that nobody complains of.
    """
    if keras.config.image_data_format() != "channels_last":
        raise InputError(
            "Keras' image_data_format is 'channels_first'; images are (height, width, channels) "
            "here: call keras.config.set_image_data_format('channels_last')"
        )
