"""Remedies against collapse: losses, terms, masks, a reward; docs/algorithms.md, Policy loss.

Tables of the core name them; each is one function that can be read by itself.
"""
