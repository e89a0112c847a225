"""Prompt datasets: generators, converters to the record layout, tokenizers of the embedded data."""
