"""Datasets of prompts and conversations: record layouts, readers, templates and generated tasks."""
