"""Sentinel, which detects and explains training problems by the statistics of each step.

`evidence.py` reduces a step to a few statistics; `signs.py` compares them with earlier steps.
"""
