"""Writes checkpoints atomically, resumes runs from them, and exports their models."""
