"""Comparison of tasks with the search corpus, before training.

`coverage` finds the accepted answers that occur in no document, `figures` computes all figures of a
split, `__main__` implements `jaxrl audit`, and `startup` checks the training tasks when a run
starts. Without this folder, runs start unchecked and `filter.unanswerable` does not exist.
"""
