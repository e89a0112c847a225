"""The recipes of verl/recipes and configs/experiment."""
