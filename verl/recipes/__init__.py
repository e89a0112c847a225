"""Published methods, one per file, for experiments in ``configs/experiment/`` that need more than options.

Experiments refer to them by import path, such as ``verl.recipes.rover:rover_loss``; no other package imports them.
"""
