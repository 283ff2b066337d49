"""Audit a run's tasks against the search corpus before training.

`coverage` finds accepted answers that occur in no document, `statistics` computes all statistics,
`__main__` implements `jaxrl audit`, and `startup` checks the training tasks when a run starts.
Without this folder, runs start without the check and `filter.unanswerable` does not exist.
"""
