"""Code that runs inside Ray actors: one process per device, all in one ``torch.distributed`` world."""
