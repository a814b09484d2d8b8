"""Faster bodies of ops for one backend; see `kmodels.core.dispatch`."""
