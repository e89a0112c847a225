"""Code inside a Ray actor: one process per device, all in one ``torch.distributed`` world."""
