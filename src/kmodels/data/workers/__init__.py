"""Worker processes that prepare samples, and how they are talked to."""
