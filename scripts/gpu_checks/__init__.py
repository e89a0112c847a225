"""What scripts/check_gpu.py checks, one module a kind of stage."""
