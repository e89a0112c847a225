"""The examples of docs/extending.md, run as a user would run them."""
