"""Translates command lines to Hydra overrides for our schema."""
