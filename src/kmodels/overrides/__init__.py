"""Faster bodies of ops: `<op>_<backend>.py` holds one function; see `kmodels.core.dispatch`."""
