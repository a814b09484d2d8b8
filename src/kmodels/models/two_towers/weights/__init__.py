"""The files of other packages that hold both towers."""
