"""Losses, loss terms, masks and a reward that prevent training collapse.

Tables in the core refer to these functions. See docs/algorithms.md, section "Policy loss".
"""
