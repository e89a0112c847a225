"""Prompts and conversations: record layouts, data sets, templates, generated tasks, published problem sets."""
