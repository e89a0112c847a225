"""Verifiers, which extract the answer from a response and compare it with the ground truth.

Verifiers do not depend on rewards or training. Importing the package does not import sympy or math-verify.
"""
