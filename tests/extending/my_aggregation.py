import numpy as np


def by_root(token_counts):
    """A trajectory counts as the square root of its tokens."""
    roots = np.sqrt(token_counts)
    return 1 / (np.maximum(roots, 1) * max(roots.sum(), 1))
