"""Trackers that need a package: Weights & Biases, MLflow and Trackio.

Each tracker continues its run after a restart. The tracker's step is the index of the record,
because the same global step can occur in two stages. Records that a restart writes again are not
resent, even if a rollback has changed them.
"""
