"""Remedies against training collapse: losses, terms, masks and a reward.

See docs/algorithms.md, Policy loss. The core's tables name them. Each is one self-contained
function.
"""
