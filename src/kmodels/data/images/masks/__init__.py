"""Images whose labels are masks: a class for each pixel."""
