"""Prompts and conversations: record layouts, datasets, templates and generated tasks."""
