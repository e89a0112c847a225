"""Code that runs in Ray actors, with one process per device. The processes form one ``torch.distributed`` world."""
