import numpy as np


def has_success(rewards, group_ids, *, least: float = 0.0):
    """Keep groups whose best trajectory earns more than `least`."""
    best = {group: rewards[group_ids == group].max() for group in np.unique(group_ids)}
    return np.array([group >= 0 and best[group] > least for group in group_ids])
