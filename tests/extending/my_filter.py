import numpy as np


def has_success(rewards, group_ids, *, least: float = 0.0):
    """Keeps the groups whose best trajectory earns more than `least`."""
    best = {one: rewards[group_ids == one].max() for one in np.unique(group_ids)}
    return np.array([one >= 0 and best[one] > least for one in group_ids])
