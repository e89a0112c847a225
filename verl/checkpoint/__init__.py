"""Writes checkpoints, which are always either complete or absent, and resumes and exports from them."""
