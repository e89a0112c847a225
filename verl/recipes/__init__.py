"""Published methods, one per file, for experiments in ``configs/experiment/`` that need custom code.

Experiments use import paths such as ``verl.recipes.rover:rover_loss``. No other package imports recipes.
"""
