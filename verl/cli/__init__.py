"""Command lines: what people type, translated to Hydra overrides of the schema at the door."""
