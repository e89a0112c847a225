"""Command lines: arguments as users type them, translated to Hydra overrides of the schema."""
