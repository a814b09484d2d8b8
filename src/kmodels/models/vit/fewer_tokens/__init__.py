"""Computing with fewer tokens: patches that are dropped in training, and tokens that are merged."""
