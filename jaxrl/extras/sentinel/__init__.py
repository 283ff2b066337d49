"""Sentinel that detects and explains training problems from the statistics of each step.

`evidence.py` reduces a step to a few statistics; `signs.py` compares them with earlier steps.
"""
