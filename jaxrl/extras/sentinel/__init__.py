"""The sentinel: judges each training step by what is measured of it, and says what is happening.

`evidence.py` reduces a step to a few numbers, `signs.py` compares them with those of earlier steps.
"""
