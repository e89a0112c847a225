"""Prompts and conversations: record layouts, datasets, templates, generated tasks, published sets of problems."""
