"""What an evaluation leaves behind: tables, plots, files and the page."""
