"""The same model on several backends, in a process each: `kmodels bench` and `kmodels parity`."""
