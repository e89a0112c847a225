"""Verifiers, which extract the answer of a response and compare it with the ground truth.

They do not depend on rewards or training. Importing the package loads neither sympy nor math-verify.
"""
