"""Sentinel: detects training problems from each step's statistics, and explains them.

`evidence.py` reduces a step to a few statistics; `signs.py` compares them with earlier steps.
"""
