"""Spectra of every prefix of a matrix: pure linear algebra on tensors, depends on torch alone."""
