"""Writes the results of an evaluation as tables, data files and an HTML page."""
