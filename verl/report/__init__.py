"""Pages that people read: what all of them share, and the page of a training run."""
