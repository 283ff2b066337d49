"""Remedies against training collapse: losses, loss terms, masks and a reward.

Each is a self-contained function, registered in a table of the core. See docs/algorithms.md,
section "Policy loss".
"""
