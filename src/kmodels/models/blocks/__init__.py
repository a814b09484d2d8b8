"""Parts that all families of models share."""
