"""Code that runs in Ray actors, one process per device. The processes form one ``torch.distributed`` world."""
