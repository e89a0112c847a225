"""Record layouts, datasets, templates and generated tasks for prompts and conversations."""
