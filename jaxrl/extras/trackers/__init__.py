"""Trackers that need a package: Weights & Biases, MLflow and Trackio.

Each tracker resumes its run after a restart. The tracker's step is the index of the record, because
the same global step can occur in two stages. Records that are written again after a restart are not
resent, even if a rollback has changed them.
"""
