"""Verifiers: they extract the answer of a response and compare it with the ground truth.

Nothing here knows of rewards or training. Importing the package loads neither sympy nor math-verify.
"""
