"""Published methods, one per file, for experiments in ``configs/experiment/`` that need custom code.

Experiments refer to methods by import path, such as ``verl.recipes.rover:rover_loss``; no other package imports them.
"""
