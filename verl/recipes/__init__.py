"""Methods of the field, a file each: what an experiment of ``configs/experiment/`` needs beyond options.

Nothing here is imported by the rest: experiments name it by import path, ``verl.recipes.rover:rover_loss``, as they
would name a researcher's own file.
"""
