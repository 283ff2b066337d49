"""Sentinel: detects training problems from measurements of each step, and explains them.

`evidence.py` reduces a step to a few numbers; `signs.py` compares them with those of earlier steps.
"""
