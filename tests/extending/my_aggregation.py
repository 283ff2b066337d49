import numpy as np


def by_root(token_counts):
    """Weight a trajectory by the square root of its token count."""
    roots = np.sqrt(token_counts)
    return 1 / (np.maximum(roots, 1) * max(roots.sum(), 1))
