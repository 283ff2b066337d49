"""Trackers that need a package: Weights & Biases, MLflow and Trackio.

Each continues its run after a restart. The step in the tracker is the record's index, since stages
share global steps. A restart repeats some records, which the tracker already has; they are not sent
again, even if a rollback has changed them.
"""
