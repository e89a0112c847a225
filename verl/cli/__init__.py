"""Translates the command lines that users type to Hydra overrides for our schema."""
