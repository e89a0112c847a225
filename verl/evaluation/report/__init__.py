"""Results of an evaluation: tables, files and the page."""
