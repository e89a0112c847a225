"""Published methods, one file each, for experiments of ``configs/experiment/`` that need more than options.

Experiments name them by import path, such as ``verl.recipes.rover:rover_loss``; no other package imports them.
"""
