"""Command lines: translates arguments as users type them to Hydra overrides of the schema."""
