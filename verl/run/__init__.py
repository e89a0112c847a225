"""Shared parts of training and evaluation runs: setup, output and exit."""
