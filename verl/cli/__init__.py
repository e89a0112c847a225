"""Translates command lines as users type them to Hydra overrides of our schema."""
